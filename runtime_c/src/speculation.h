/* SPDX-License-Identifier: MIT
 *
 * speculation.h: how many draft tokens speculative decoding should make and verify: as many as
 * raise the tokens per second, by the measured times of this machine and the acceptance rate in a
 * text. Results do not depend on it. Elsewhere a draft token is called a guess.
 */
#ifndef BITNET_SPECULATION_H
#define BITNET_SPECULATION_H

#include <stdint.h>

enum { BN_TIMED_ROWS = 32 };

/* Measured times of a model in seconds; 0: not yet known, and treated as equal for all
 * alternatives. */
typedef struct bn_timings {
    double pass[BN_TIMED_ROWS];        /* a pass over i + 1 rows, without making its guesses */
    double draft_round[BN_TIMED_ROWS]; /* a round of guesses, one for each of i + 1 texts */
    double catch_up;                   /* a row that the draft computes to keep up with a text */
    int doubted; /* 1: the draft was recently given up for a text, and has saved no
                  * time since */
} bn_timings;

/* Recent outcomes of a text's draft tokens. Their draft probability is called confidence. */
typedef struct bn_draft_stats {
    double verified, expected, accepted; /* guesses; Σ of their confidence; those that were right */
    double spent;                        /* seconds that the draft took, minus those it saved */
    int32_t rests;                       /* passes since the last one with a guess */
} bn_draft_stats;

/* A planned pass, to which draft tokens are added while there is room and they are worth it. */
typedef struct bn_draft_budget {
    int32_t rows, most; /* rows of all texts so far, and limit */
    double tokens;      /* tokens that these rows are expected to give */
    double drafting;    /* seconds spent making its guesses */
} bn_draft_budget;

/* Record a measured time: of a pass of n rows or a round of n guesses; of a row of keeping up. */
void bn_note_time(double *known, int32_t n, double seconds);
void bn_note_catch_up(bn_timings *timings, double seconds);

/* Additional rows for a pass, and its tokens and time with them. */
typedef struct bn_draft_plan {
    int32_t rows;
    double tokens, seconds;
} bn_draft_plan;

/* The best use of n existing guesses. probabilities: for each, that it will be accepted,
 * decreasing. */
bn_draft_plan bn_plan_verifying(const bn_timings *timings, const bn_draft_budget *budget,
                                const double *probabilities, int32_t n);

/* The same for at most BN_TIMED_ROWS guesses that a draft would still have to make, one after the
 * other. */
bn_draft_plan bn_plan_drafting(const bn_timings *timings, const bn_draft_budget *budget,
                               const bn_draft_stats *stats, int32_t n);

/* Whether it gives no fewer tokens per second, or, while times are unknown, no fewer tokens. Both
 * are of one budget, so both times are known or neither is. */
int bn_plan_is_better(const bn_draft_plan *plan, bn_draft_plan than);

/* How many of n texts should get one more guess, so that the pass gives most tokens per second.
 * probabilities: for each text, that its guess will be accepted, decreasing. */
int32_t bn_plan_round(const bn_timings *timings, const bn_draft_budget *budget,
                      const double *probabilities, int32_t n);

/* Whether to try a guess that has not been worth making for some time, so that the statistics are
 * renewed. */
int bn_draft_retry(bn_draft_stats *stats);

/* Charge a text for the draft: its share of a round for n texts; n rows to keep up. The recorded
 * times are used, so that a single disturbance has no effect. */
void bn_charge_round(bn_draft_stats *stats, const bn_timings *timings, int32_t n);
void bn_charge_catch_up(bn_draft_stats *stats, const bn_timings *timings, int32_t n);

/* Settle after a pass with `base_rows` rows besides guesses and `rows` in all: n of them were draft
 * guesses for this text, of which `accepted` were right. */
void bn_draft_settle(bn_draft_stats *stats, const bn_timings *timings, int32_t base_rows,
                     int32_t rows, int32_t n, int32_t accepted);

/* Whether the draft has cost a text more than it can recover and is given up. The next text of that
 * model then gets less credit. */
int bn_draft_given_up(const bn_draft_stats *stats, bn_timings *timings);

/* The share of verified guesses that were right; initially that of a good draft. */
double bn_acceptance_rate(const bn_draft_stats *stats);

/* A guess with this confidence was made, after others that are all right with probability
 * `joint`. Returns whether it is worth its row; if so, updates the budget and `joint`. */
int bn_draft_take(const bn_timings *timings, const bn_draft_stats *stats, bn_draft_budget *budget,
                  double *joint, double confidence);

/* Record whether a guess was right. */
void bn_draft_note(bn_draft_stats *stats, double confidence, int accepted);

#endif
