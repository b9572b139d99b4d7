/* SPDX-License-Identifier: MIT
 *
 * pace.h: when guesses are worth their time: how long steps take on this machine, and how often
 * guesses at a text come true. It is learned on the way. Results do not depend on it.
 */
#ifndef BITNET_PACE_H
#define BITNET_PACE_H

#include <stdint.h>

enum { BN_PACE_ROWS = 8 };

/* Of a model: seconds, 0 while they are not known; then what comes is as quick as it can be. */
typedef struct bn_pace {
    double step[BN_PACE_ROWS]; /* that computes i + 1 rows, its guesses not counted */
    double guess;
} bn_pace;

/* Of a text: what became of its guesses of late. */
typedef struct bn_luck {
    double offered, promised, right; /* guesses whose turn came, Σ of their confidence, true ones */
    int32_t rests;                   /* steps since the last one with a guess */
    int32_t vain;                    /* that many rests did not make guesses worth it */
} bn_luck;

/* Guesses behind a token that is sure. */
typedef struct bn_chain {
    int32_t n;
    double path;     /* probability that all are right */
    double expected; /* tokens of a step that computes them */
} bn_chain;

static inline bn_chain bn_chain_begin(void) {
    return (bn_chain){.path = 1, .expected = 1};
}

double bn_seconds(void); /* of a clock that only goes forward */

/* A step with so many guesses took so long, all guesses made for it included, which took theirs. */
void bn_pace_note(bn_pace *pace, int32_t guesses, double seconds, int32_t made, double guessing);

/* Whether one more guess promises more tokens a second. */
int bn_pace_guess(const bn_pace *pace, bn_luck *luck, const bn_chain *chain);

/* Whether that can be given up. */
static inline int bn_luck_is_out(const bn_luck *luck) {
    return luck->vain > 4;
}

/* One was made, with this confidence: whether it is worth its row. If so it is one of the chain. */
int bn_pace_take(const bn_pace *pace, const bn_luck *luck, bn_chain *chain, double confidence);

/* A guess came true, or did not. */
void bn_luck_note(bn_luck *luck, double confidence, int right);

#endif
