/* SPDX-License-Identifier: MIT
 *
 * pace.h: when guesses are worth their time: how long steps take on this machine, and how often
 * guesses at a text come true. It is learned on the way. Results do not depend on it.
 */
#ifndef BITNET_PACE_H
#define BITNET_PACE_H

#include <stdint.h>

enum { BN_PACE_ROWS = 32, BN_REPEATS = 8 };

/* Of a model: seconds, 0 while they are not known; then what comes is as quick as it can be. */
typedef struct bn_pace {
    double pass[BN_PACE_ROWS];  /* that computes i + 1 rows, its guesses not counted */
    double round[BN_PACE_ROWS]; /* of guesses, one for each of i + 1 texts */
    double keep;                /* a row of the draft, by which it keeps up with a text */
    int doubted;                /* of late it was given up for a text, and earned nothing since */
} bn_pace;

/* Of a text: what became of its guesses of late. */
typedef struct bn_luck {
    double offered, promised, right; /* guesses whose turn came, Σ of their confidence, true ones */
    double spent;                    /* seconds that the draft took, less those that it saved */
    int32_t rests;                   /* passes since the last one with a guess */
} bn_luck;

/* Of a text: where it repeats itself, and how often it went on as before (session/repeats.h). */
typedef struct bn_repeats {
    int32_t seen;        /* tokens of the text */
    int32_t back, agree; /* `agree` tokens up to the last, BN_REPEATS or more of them counting as
                          * that, stand so far back, too; 0: none */
    double offered[BN_REPEATS], right[BN_REPEATS]; /* by how many agreed, less one: tokens that came
                                                    * behind; those that were the same, too */
    int32_t rests; /* likely guesses since the last that was computed */
} bn_repeats;

/* A pass before it is computed. */
typedef struct bn_outlook {
    int32_t rows, most; /* that it has, of all texts, and can have */
    double tokens;      /* they are expected to give */
    double guessing;    /* seconds that went into its guesses */
} bn_outlook;

double bn_seconds(void); /* of a clock that only goes forward */

/* It took so long: a pass of n rows, or a round of n guesses; a row of keeping up. */
void bn_pace_note(double *known, int32_t n, double seconds);
void bn_pace_note_keep(bn_pace *pace, double seconds);

/* Rows more that a pass might have, and what it were with them. */
typedef struct bn_offer {
    int32_t rows;
    double tokens, seconds;
} bn_offer;

/* The best that comes of guesses that are there: of each the probability that it will count, which
 * falls. */
bn_offer bn_pace_rows(const bn_pace *pace, const bn_outlook *pass, const double *gains, int32_t n);

/* And of guesses that a draft would have to make, one after the other. */
bn_offer bn_pace_chain(const bn_pace *pace, const bn_outlook *pass, const bn_luck *luck, int32_t n);

/* Whether it gives more tokens a second, or, while times are not known, more tokens. */
int bn_is_better(const bn_offer *offer, bn_offer than);

/* The largest of n numbers come first: how many texts shall have one more guess, so that the pass
 * gives most tokens a second. gains: the probability of each that it will count. */
int32_t bn_pace_round(const bn_pace *pace, const bn_outlook *pass, const double *gains, int32_t n);

/* Whether a guess was worth making from where it was not for some time: so that what is known does
 * not stay as it is. */
int bn_luck_try(bn_luck *luck);

/* What the draft took for a text: a share of a round for n texts, and n rows to keep up. What is
 * known of these counts, so that nothing comes of a single disturbance. */
void bn_luck_round(bn_luck *luck, const bn_pace *pace, int32_t n);
void bn_luck_keep(bn_luck *luck, const bn_pace *pace, int32_t n);

/* A pass had this many rows besides guesses, and in all; n of these were the draft's for a text, of
 * which so many were right. */
void bn_luck_settle(bn_luck *luck, const bn_pace *pace, int32_t sure, int32_t rows, int32_t n,
                    int32_t right);

/* Whether the draft has cost a text more than it brings in the end, and is given up. A model whose
 * draft was gets less credit with the next. */
int bn_luck_is_out(const bn_luck *luck, bn_pace *pace);

/* Of guesses whose turn came, how many were right; at first as many as of a good draft. */
double bn_luck_share(const bn_luck *luck);

/* A guess was made, with this confidence, behind others that are right with probability `path`:
 * whether it is worth its row. If so the pass has it, and the path. */
int bn_pace_take(const bn_pace *pace, const bn_luck *luck, bn_outlook *pass, double *path,
                 double confidence);

/* A guess came true, or did not. */
void bn_luck_note(bn_luck *luck, double confidence, int right);

#endif
