/* SPDX-License-Identifier: MIT
 *
 * pace.c: see pace.h.
 *
 * With k guesses, each right with probability p if those before it are, a step gives
 * E = 1 + p + … + p^k tokens in T(k + 1) + k·c seconds: one more is made while that raises the
 * ratio of the two. p is first how often guesses were right, then how sure the draft is of this
 * one, corrected by what became of such promises.
 */
#define _POSIX_C_SOURCE 200112L /* clock_gettime */

#include "pace.h"

#include <time.h>

enum { REST = 64 /* steps without a guess until one is tried anyway */ };
#define MEMORY (31.0 / 32) /* of what came before, at each guess */

double bn_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* What disturbs a measurement makes it longer: so one that is shorter counts at once. */
static void note(double *known, double seconds) {
    *known = *known == 0 || seconds < *known ? seconds : *known + (seconds - *known) / 8;
}

void bn_pace_note(bn_pace *pace, int32_t guesses, double seconds, int32_t made, double guessing) {
    if (guesses < BN_PACE_ROWS)
        note(&pace->step[guesses], seconds - guessing);
    if (made > 0)
        note(&pace->guess, guessing / made);
}

/* More rows are not quicker; of so many more than are known nothing is. */
static double step(const bn_pace *pace, int32_t guesses) {
    double seconds = 0;
    for (int32_t i = 0; i <= guesses && i < BN_PACE_ROWS; i++)
        seconds = pace->step[i] > seconds ? pace->step[i] : seconds;
    return seconds;
}

/* Of guesses whose turn came, how many were right; at first as many as of a good draft. */
static double share(const bn_luck *luck) {
    return (luck->right + 3) / (luck->offered + 4);
}

/* A sampled guess may be right more often than its own probability says. */
static double probability(const bn_luck *luck, double confidence) {
    const double p = confidence * (luck->right + 1) / (luck->promised + 1);
    return p < 1 ? p : 1;
}

/* Tokens a second; the time may be unknown, and all the same for both that are compared. */
static int is_quicker(double tokens, double seconds, double than_tokens, double than_seconds) {
    return tokens * than_seconds >= than_tokens * seconds;
}

int bn_pace_guess(const bn_pace *pace, bn_luck *luck, const bn_chain *chain) {
    const double p = share(luck), n = chain->n;
    const int good = is_quicker(chain->expected + chain->path * p,
                                step(pace, chain->n + 1) + (n + 1) * pace->guess, chain->expected,
                                step(pace, chain->n) + n * pace->guess);
    if (chain->n + 1 >= BN_PACE_ROWS || (!good && (chain->n > 0 || ++luck->rests < REST)))
        return 0;
    luck->vain = good ? 0 : luck->vain + 1;
    luck->rests = 0;
    return 1;
}

int bn_pace_take(const bn_pace *pace, const bn_luck *luck, bn_chain *chain, double confidence) {
    const double path = chain->path * probability(luck, confidence);
    const double guessing = (chain->n + 1) * pace->guess;
    if (!is_quicker(chain->expected + path, step(pace, chain->n + 1) + guessing, chain->expected,
                    step(pace, chain->n) + guessing))
        return 0;
    *chain = (bn_chain){chain->n + 1, path, chain->expected + path};
    return 1;
}

void bn_luck_note(bn_luck *luck, double confidence, int right) {
    luck->offered = luck->offered * MEMORY + 1;
    luck->promised = luck->promised * MEMORY + confidence;
    luck->right = luck->right * MEMORY + (right != 0);
}
