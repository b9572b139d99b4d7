/* SPDX-License-Identifier: MIT
 *
 * pace.h: when speculative guesses are worth their time: how long steps take on this machine, and
 * how often guesses are right in a text. Both are measured while running. Results do not depend on
 * them.
 */
#ifndef BITNET_PACE_H
#define BITNET_PACE_H

#include <stdint.h>

enum { BN_PACE_ROWS = 32 };

/* Measured times of a model in seconds; 0: not yet known, and treated as equal for all
 * alternatives. */
typedef struct bn_pace {
    double pass[BN_PACE_ROWS];  /* a pass over i + 1 rows, without making guesses */
    double round[BN_PACE_ROWS]; /* a round of guesses, one for each of i + 1 texts */
    double keep;                /* a row that the draft computes to keep up with a text */
    int doubted;                /* 1: the draft was recently given up for a text, and has saved no
                                 * time since */
} bn_pace;

/* Recent outcomes of a text's guesses. */
typedef struct bn_luck {
    double offered, promised, right; /* guesses checked, Σ of their confidence, correct ones */
    double spent;                    /* seconds that the draft took, minus those it saved */
    int32_t rests;                   /* passes since the last one with a guess */
} bn_luck;

/* A planned pass. */
typedef struct bn_outlook {
    int32_t rows, most; /* rows of all texts so far, and limit */
    double tokens;      /* tokens that these rows are expected to give */
    double guessing;    /* seconds spent making its guesses */
} bn_outlook;

double bn_seconds(void); /* of a monotonic clock */

/* Record a measured time: of a pass of n rows or a round of n guesses; of a row of keeping up. */
void bn_pace_note(double *known, int32_t n, double seconds);
void bn_pace_note_keep(bn_pace *pace, double seconds);

/* Additional rows for a pass, and its tokens and time with them. */
typedef struct bn_offer {
    int32_t rows;
    double tokens, seconds;
} bn_offer;

/* The best use of n existing guesses. gains: the probability of each that it will count,
 * decreasing. */
bn_offer bn_pace_rows(const bn_pace *pace, const bn_outlook *pass, const double *gains, int32_t n);

/* The same for guesses that a draft would still have to make, one after the other. */
bn_offer bn_pace_chain(const bn_pace *pace, const bn_outlook *pass, const bn_luck *luck, int32_t n);

/* Whether it gives more tokens per second, or, while times are unknown, more tokens. */
int bn_is_better(const bn_offer *offer, bn_offer than);

/* How many of n texts should get one more guess, so that the pass gives most tokens per second.
 * gains: for each text the probability that its guess will count, decreasing. */
int32_t bn_pace_round(const bn_pace *pace, const bn_outlook *pass, const double *gains, int32_t n);

/* Whether to try a guess that has not been worth making for some time, so that the statistics are
 * renewed. */
int bn_luck_try(bn_luck *luck);

/* Charge a text for the draft: its share of a round for n texts; n rows to keep up. The recorded
 * times are used, so that a single disturbance has no effect. */
void bn_luck_round(bn_luck *luck, const bn_pace *pace, int32_t n);
void bn_luck_keep(bn_luck *luck, const bn_pace *pace, int32_t n);

/* Settle after a pass with `sure` rows besides guesses and `rows` in all: n of them were draft
 * guesses for this text, of which `right` were correct. */
void bn_luck_settle(bn_luck *luck, const bn_pace *pace, int32_t sure, int32_t rows, int32_t n,
                    int32_t right);

/* Whether the draft has cost a text more than it can recover and is given up. The next text of that
 * model then gets less credit. */
int bn_luck_is_out(const bn_luck *luck, bn_pace *pace);

/* Share of checked guesses that were right; initially that of a good draft. */
double bn_luck_share(const bn_luck *luck);

/* A guess with this confidence was made, after others that are right with probability `path`.
 * Returns whether it is worth its row; if so, updates the pass and the path. */
int bn_pace_take(const bn_pace *pace, const bn_luck *luck, bn_outlook *pass, double *path,
                 double confidence);

/* Record whether a guess was right. */
void bn_luck_note(bn_luck *luck, double confidence, int right);

#endif
