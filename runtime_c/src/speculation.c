/* SPDX-License-Identifier: MIT
 *
 * speculation.c: see speculation.h.
 *
 * A pass of R rows takes T(R) seconds and each round of guesses before it G. Rows of known tokens
 * give one token each; a guess gives its joint probability, the product of those of its text's
 * guesses up to and including it. Another guess is made, or computed, while that raises the tokens
 * per second of the whole pass. The probability is at first the acceptance rate;
 * once the guess is made, the draft's confidence in it, calibrated by past outcomes.
 */
#include "speculation.h"

#include <stddef.h>

enum { REST = 64 };        /* passes without a guess before one is tried anyway */
#define CREDIT 4.0         /* tokens whose time a draft may cost a text before it must pay off */
#define DOUBT (1.0 / 4)    /* fraction of that after a draft was given up */
#define MEMORY (31.0 / 32) /* decay of past outcomes per guess */

/* Disturbances only make a measurement longer, so a shorter one counts at once. */
static void note(double *known, double seconds) {
    *known = *known == 0 || seconds < *known ? seconds : *known + (seconds - *known) / 8;
}

/* A pass with fewer rows is not slower, so times of fewer rows are capped. */
void bn_note_time(double *known, int32_t n, double seconds) {
    if (n > BN_TIMED_ROWS)
        return;
    note(&known[n - 1], seconds);
    for (int32_t i = 0; i < n - 1; i++)
        if (known[i] > known[n - 1])
            known[i] = known[n - 1];
}

void bn_note_catch_up(bn_timings *timings, double seconds) {
    note(&timings->catch_up, seconds);
}

/* A pass with more rows is not faster: the maximum up to n rows. */
static double of(const double *known, int32_t n) {
    double seconds = 0;
    for (int32_t i = 0; i < n && i < BN_TIMED_ROWS; i++)
        seconds = known[i] > seconds ? known[i] : seconds;
    return seconds;
}

double bn_acceptance_rate(const bn_draft_stats *stats) {
    return (stats->accepted + 3) / (stats->verified + 4);
}

/* A sampled guess may be right more often than its own probability says. */
static double calibrated(const bn_draft_stats *stats, double confidence) {
    const double p = confidence * (stats->accepted + 1) / (stats->expected + 1);
    return p < 1 ? p : 1;
}

/* Compare tokens per second; the times are either both known or both 0. */
static int is_quicker(double tokens, double seconds, double than_tokens, double than_seconds) {
    return tokens * than_seconds >= than_tokens * seconds;
}

/* Time of the pass with this many rows and this much additional drafting; 0: unknown. */
static double time_of(const bn_timings *timings, const bn_draft_budget *budget, int32_t rows,
                      double drafting) {
    const double seconds = of(timings->pass, rows);
    return seconds > 0 ? seconds + budget->drafting + drafting : 0;
}

/* The best number of additional rows, up to n. drafting: seconds to guess i + 1 of them, or
 * NULL. */
static bn_draft_plan best_of(const bn_timings *timings, const bn_draft_budget *budget,
                             const double *probabilities, const double *drafting, int32_t n) {
    bn_draft_plan best = {.tokens = budget->tokens,
                          .seconds = time_of(timings, budget, budget->rows, 0)};
    double tokens = budget->tokens;
    for (int32_t m = 1; m <= n && budget->rows + m <= budget->most; m++) {
        const double longer =
            time_of(timings, budget, budget->rows + m, drafting ? drafting[m - 1] : 0);
        tokens += probabilities[m - 1];
        if (is_quicker(tokens, longer, best.tokens, best.seconds))
            best = (bn_draft_plan){.rows = m, .tokens = tokens, .seconds = longer};
    }
    return best;
}

bn_draft_plan bn_plan_verifying(const bn_timings *timings, const bn_draft_budget *budget,
                                const double *probabilities, int32_t n) {
    return best_of(timings, budget, probabilities, NULL, n);
}

bn_draft_plan bn_plan_drafting(const bn_timings *timings, const bn_draft_budget *budget,
                               const bn_draft_stats *stats, int32_t n) {
    double probabilities[BN_TIMED_ROWS], drafting[BN_TIMED_ROWS], joint = 1;
    for (int32_t i = 0; i < n; i++) {
        probabilities[i] = joint *= bn_acceptance_rate(stats);
        drafting[i] = (i + 1) * of(timings->draft_round, 1);
    }
    return best_of(timings, budget, probabilities, drafting, n);
}

int bn_plan_is_better(const bn_draft_plan *plan, bn_draft_plan than) {
    return plan->seconds > 0 ? is_quicker(plan->tokens, plan->seconds, than.tokens, than.seconds)
                             : plan->tokens >= than.tokens;
}

int32_t bn_plan_round(const bn_timings *timings, const bn_draft_budget *budget,
                      const double *probabilities, int32_t n) {
    double drafting[BN_TIMED_ROWS];
    for (int32_t i = 0; i < n; i++)
        drafting[i] = of(timings->draft_round, i + 1);
    return best_of(timings, budget, probabilities, drafting, n).rows;
}

int bn_draft_retry(bn_draft_stats *stats) {
    if (++stats->rests < REST)
        return 0;
    stats->rests = 0;
    return 1;
}

void bn_charge_round(bn_draft_stats *stats, const bn_timings *timings, int32_t n) {
    stats->spent += of(timings->draft_round, n) / n;
}

void bn_charge_catch_up(bn_draft_stats *stats, const bn_timings *timings, int32_t n) {
    stats->spent += timings->catch_up * n;
}

/* Savings may be spent again, up to a limit, as a text can change. */
void bn_draft_settle(bn_draft_stats *stats, const bn_timings *timings, int32_t base_rows,
                     int32_t rows, int32_t n, int32_t accepted) {
    const double seconds = of(timings->pass, base_rows), least = -CREDIT * of(timings->pass, 1);
    if (n < 1)
        return;
    stats->spent += n * (of(timings->pass, rows) - seconds) / (rows - base_rows) -
                    accepted * seconds / base_rows;
    stats->spent = stats->spent < least ? least : stats->spent;
}

int bn_draft_given_up(const bn_draft_stats *stats, bn_timings *timings) {
    const double credit = CREDIT * of(timings->pass, 1);
    if (stats->spent < 0)
        timings->doubted = 0;
    const int out = credit > 0 && stats->spent > (timings->doubted ? DOUBT * credit : credit);
    timings->doubted |= out;
    return out;
}

int bn_draft_take(const bn_timings *timings, const bn_draft_stats *stats, bn_draft_budget *budget,
                  double *joint, double confidence) {
    const double accepted = *joint * calibrated(stats, confidence);
    if (!is_quicker(budget->tokens + accepted, time_of(timings, budget, budget->rows + 1, 0),
                    budget->tokens, time_of(timings, budget, budget->rows, 0)))
        return 0;
    budget->rows++;
    budget->tokens += accepted;
    *joint = accepted;
    return 1;
}

void bn_draft_note(bn_draft_stats *stats, double confidence, int accepted) {
    stats->verified = stats->verified * MEMORY + 1;
    stats->expected = stats->expected * MEMORY + confidence;
    stats->accepted = stats->accepted * MEMORY + (accepted != 0);
}
