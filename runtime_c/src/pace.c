/* SPDX-License-Identifier: MIT
 *
 * pace.c: see pace.h.
 *
 * A pass of R rows takes T(R) seconds and each round of guesses before it G. Rows of tokens that
 * are sure give one token each; a guess gives its path, the product of the probabilities of those
 * of its text up to it. A guess more is made, or computed, while that raises the tokens a second of
 * the whole pass. The probability is first how often guesses were right, then how sure the draft is
 * of this one, corrected by what became of such promises.
 */
#define _POSIX_C_SOURCE 200112L /* clock_gettime */

#include "pace.h"

#include <time.h>

enum { REST = 64 /* passes without a guess until one is tried anyway */ };
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

void bn_pace_note(double *known, int32_t n, double seconds) {
    if (n >= 1 && n <= BN_PACE_ROWS)
        note(&known[n - 1], seconds);
}

/* More rows are not quicker. */
static double of(const double *known, int32_t n) {
    double seconds = 0;
    for (int32_t i = 0; i < n && i < BN_PACE_ROWS; i++)
        seconds = known[i] > seconds ? known[i] : seconds;
    return seconds;
}

/* Of guesses whose turn came, how many were right; at first as many as of a good draft. */
double bn_luck_share(const bn_luck *luck) {
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

/* That the pass takes with so many rows and so much more guessing; 0: it is not known. */
static double time_of(const bn_pace *pace, const bn_outlook *pass, int32_t rows, double guessing) {
    const double seconds = of(pace->pass, rows);
    return seconds > 0 ? seconds + pass->guessing + guessing : 0;
}

int32_t bn_pace_round(const bn_pace *pace, const bn_outlook *pass, const double *gains, int32_t n) {
    double tokens = pass->tokens, best = tokens, seconds = time_of(pace, pass, pass->rows, 0);
    int32_t texts = 0;
    for (int32_t m = 1; m <= n && pass->rows + m <= pass->most; m++) {
        const double longer = time_of(pace, pass, pass->rows + m, of(pace->round, m));
        tokens += gains[m - 1];
        if (!is_quicker(tokens, longer, best, seconds))
            continue;
        best = tokens;
        seconds = longer;
        texts = m;
    }
    return texts;
}

int bn_luck_try(bn_luck *luck) {
    if (++luck->rests < REST)
        return 0;
    luck->rests = 0;
    luck->vain++;
    return 1;
}

int bn_pace_take(const bn_pace *pace, const bn_luck *luck, bn_outlook *pass, double *path,
                 double confidence) {
    const double gain = *path * probability(luck, confidence);
    if (!is_quicker(pass->tokens + gain, time_of(pace, pass, pass->rows + 1, 0), pass->tokens,
                    time_of(pace, pass, pass->rows, 0)))
        return 0;
    pass->rows++;
    pass->tokens += gain;
    *path = gain;
    return 1;
}

void bn_luck_note(bn_luck *luck, double confidence, int right) {
    luck->offered = luck->offered * MEMORY + 1;
    luck->promised = luck->promised * MEMORY + confidence;
    luck->right = luck->right * MEMORY + (right != 0);
}
