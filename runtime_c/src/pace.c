/* SPDX-License-Identifier: MIT
 *
 * pace.c: see pace.h.
 *
 * A pass of R rows takes T(R) seconds and each round of guesses before it G. Rows of known tokens
 * give one token each; a guess gives its path, the product of the probabilities of its text's
 * guesses up to and including it. Another guess is made, or computed, while that raises the tokens
 * per second of the whole pass. The probability is at first the share of guesses that were right;
 * once the guess is made, the draft's confidence in it, calibrated by past outcomes.
 */
#define _POSIX_C_SOURCE 200112L /* clock_gettime */

#include "pace.h"

#include <time.h>

enum { REST = 64 };        /* passes without a guess before one is tried anyway */
#define CREDIT 4.0         /* tokens whose time a draft may cost a text before it must pay off */
#define DOUBT (1.0 / 4)    /* fraction of that after a draft was given up */
#define MEMORY (31.0 / 32) /* decay of past outcomes per guess */

double bn_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Disturbances only make a measurement longer, so a shorter one counts at once. */
static void note(double *known, double seconds) {
    *known = *known == 0 || seconds < *known ? seconds : *known + (seconds - *known) / 8;
}

/* A pass with fewer rows is not slower, so times of fewer rows are capped. */
void bn_pace_note(double *known, int32_t n, double seconds) {
    if (n < 1 || n > BN_PACE_ROWS)
        return;
    note(&known[n - 1], seconds);
    for (int32_t i = 0; i < n - 1; i++)
        if (known[i] > known[n - 1])
            known[i] = known[n - 1];
}

void bn_pace_note_keep(bn_pace *pace, double seconds) {
    note(&pace->keep, seconds);
}

/* A pass with more rows is not faster: the maximum up to n rows. */
static double of(const double *known, int32_t n) {
    double seconds = 0;
    for (int32_t i = 0; i < n && i < BN_PACE_ROWS; i++)
        seconds = known[i] > seconds ? known[i] : seconds;
    return seconds;
}

double bn_luck_share(const bn_luck *luck) {
    return (luck->right + 3) / (luck->offered + 4);
}

/* A sampled guess may be right more often than its own probability says. */
static double probability(const bn_luck *luck, double confidence) {
    const double p = confidence * (luck->right + 1) / (luck->promised + 1);
    return p < 1 ? p : 1;
}

/* Compare tokens per second; the times are either both known or both 0. */
static int is_quicker(double tokens, double seconds, double than_tokens, double than_seconds) {
    return tokens * than_seconds >= than_tokens * seconds;
}

/* Time of the pass with this many rows and this much additional guessing; 0: unknown. */
static double time_of(const bn_pace *pace, const bn_outlook *pass, int32_t rows, double guessing) {
    const double seconds = of(pace->pass, rows);
    return seconds > 0 ? seconds + pass->guessing + guessing : 0;
}

/* The best number of additional rows, up to n. guessing: seconds to guess i + 1 of them, or
 * NULL. */
static bn_offer best_of(const bn_pace *pace, const bn_outlook *pass, const double *gains,
                        const double *guessing, int32_t n) {
    bn_offer best = {.tokens = pass->tokens, .seconds = time_of(pace, pass, pass->rows, 0)};
    double tokens = pass->tokens;
    for (int32_t m = 1; m <= n && pass->rows + m <= pass->most; m++) {
        const double longer = time_of(pace, pass, pass->rows + m, guessing ? guessing[m - 1] : 0);
        tokens += gains[m - 1];
        if (is_quicker(tokens, longer, best.tokens, best.seconds))
            best = (bn_offer){.rows = m, .tokens = tokens, .seconds = longer};
    }
    return best;
}

bn_offer bn_pace_rows(const bn_pace *pace, const bn_outlook *pass, const double *gains, int32_t n) {
    return best_of(pace, pass, gains, NULL, n);
}

bn_offer bn_pace_chain(const bn_pace *pace, const bn_outlook *pass, const bn_luck *luck,
                       int32_t n) {
    double gains[BN_PACE_ROWS], guessing[BN_PACE_ROWS], path = 1;
    n = n < BN_PACE_ROWS ? n : BN_PACE_ROWS;
    for (int32_t i = 0; i < n; i++) {
        gains[i] = path *= bn_luck_share(luck);
        guessing[i] = (i + 1) * of(pace->round, 1);
    }
    return best_of(pace, pass, gains, guessing, n);
}

int bn_is_better(const bn_offer *offer, bn_offer than) {
    return offer->seconds > 0 && than.seconds > 0
               ? is_quicker(offer->tokens, offer->seconds, than.tokens, than.seconds)
               : offer->tokens >= than.tokens;
}

int32_t bn_pace_round(const bn_pace *pace, const bn_outlook *pass, const double *gains, int32_t n) {
    double guessing[BN_PACE_ROWS];
    for (int32_t i = 0; i < n; i++)
        guessing[i] = of(pace->round, i + 1);
    return best_of(pace, pass, gains, guessing, n).rows;
}

int bn_luck_try(bn_luck *luck) {
    if (++luck->rests < REST)
        return 0;
    luck->rests = 0;
    return 1;
}

void bn_luck_round(bn_luck *luck, const bn_pace *pace, int32_t n) {
    luck->spent += of(pace->round, n) / n;
}

void bn_luck_keep(bn_luck *luck, const bn_pace *pace, int32_t n) {
    luck->spent += pace->keep * n;
}

/* Savings may be spent again, up to a limit, as a text can change. */
void bn_luck_settle(bn_luck *luck, const bn_pace *pace, int32_t sure, int32_t rows, int32_t n,
                    int32_t right) {
    const double seconds = of(pace->pass, sure), least = -CREDIT * of(pace->pass, 1);
    if (n < 1)
        return;
    luck->spent += n * (of(pace->pass, rows) - seconds) / (rows - sure) - right * seconds / sure;
    luck->spent = luck->spent < least ? least : luck->spent;
}

int bn_luck_is_out(const bn_luck *luck, bn_pace *pace) {
    const double credit = CREDIT * of(pace->pass, 1);
    if (luck->spent < 0)
        pace->doubted = 0;
    const int out = credit > 0 && luck->spent > (pace->doubted ? DOUBT * credit : credit);
    pace->doubted |= out;
    return out;
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
