/* SPDX-License-Identifier: MIT
 *
 * repeats.c: see repeats.h.
 *
 * The earlier place whose context agrees with the most of the last tokens, up to a limit, the
 * latest on ties, is followed until it is wrong. It is stored as a distance, so a guess is the
 * token that far back, which may itself be a guess; a text in a loop is guessed as a loop.
 * Searching for a place reads the text once, which is little compared to the keys that a pass
 * reads.
 */
#include "repeats.h"

#include "guess.h"
#include "session.h"

enum {
    PAST = 128, /* tokens of a prompt's end that it learns from at first */
    REST = 128  /* likely guesses skipped as not worth it before one is computed anyway */
};
#define LEAST (1.0 / 16) /* guesses less likely than this are not made */
#define LIKELY (1.0 / 2)
#define MEMORY (31.0 / 32)

static int32_t agreeing(const int32_t *tokens, int32_t n, int32_t back) {
    int32_t agree = 0;
    while (agree < BN_REPEATS && agree + back < n &&
           tokens[n - 1 - agree] == tokens[n - 1 - agree - back] &&
           tokens[n - 1 - agree] != BN_NO_TOKEN)
        agree++;
    return agree;
}

static void find(bn_repeats *r, const int32_t *tokens, int32_t n) {
    const int32_t last = tokens[n - 1];
    r->back = r->agree = 0;
    for (int32_t back = 1; back < n && r->agree < BN_REPEATS; back++) {
        if (tokens[n - 1 - back] != last)
            continue;
        const int32_t agree = agreeing(tokens, n, back);
        if (agree > r->agree) {
            r->agree = agree;
            r->back = back;
        }
    }
}

/* Initially guesses count as right every second time. */
static double share(const bn_repeats *r, int32_t agree) {
    const int32_t i = bn_smaller(agree, BN_REPEATS) - 1;
    return (r->right[i] + 1) / (r->offered[i] + 2);
}

static void note(bn_repeats *r, int right) {
    const int32_t i = r->agree - 1;
    r->offered[i] = r->offered[i] * MEMORY + 1;
    r->right[i] = r->right[i] * MEMORY + (right != 0);
}

void bn_repeats_see(bn_repeats *r, const int32_t *tokens, int32_t n) {
    if (n <= r->seen || n - r->seen > PAST) { /* rewound, or just started */
        r->back = 0;
        r->seen = n <= r->seen ? n - 1 : n - PAST;
    }
    for (; r->seen < n; r->seen++) {
        const int32_t token = tokens[r->seen];
        const int right = r->back > 0 && token != BN_NO_TOKEN && token == tokens[r->seen - r->back];
        if (r->back > 0)
            note(r, right);
        if (right)
            r->agree = bn_smaller(r->agree + 1, BN_REPEATS);
        else
            find(r, tokens, r->seen + 1);
    }
}

int32_t bn_repeats_guess(const bn_repeats *r, int32_t *tokens, int32_t n, int32_t most,
                         double *probabilities) {
    double joint = 1;
    for (int32_t i = 0; i < most; i++) {
        const int32_t token = r->back > 0 ? tokens[n + i - r->back] : BN_NO_TOKEN;
        joint *= token != BN_NO_TOKEN ? share(r, r->agree + i) : 0;
        if (joint < LEAST)
            return i;
        tokens[n + i] = token;
        probabilities[i] = joint;
    }
    return most;
}

/* How many of n guesses are worth their rows; `best` is the plan with them. Likely ones that are
 * not worth it are still computed now and then, or a single disturbed time measurement would be
 * believed forever. */
static int32_t worth(bn_repeats *r, const bn_timings *timings, const bn_draft_budget *budget,
                     const double *probabilities, int32_t n, bn_draft_plan *best) {
    *best = bn_plan_verifying(timings, budget, probabilities, n);
    if (best->rows > 0 || n < 1 || probabilities[0] < LIKELY || ++r->rests < REST)
        return best->rows;
    for (; best->rows < n && probabilities[best->rows] >= LIKELY; best->rows++)
        best->tokens += probabilities[best->rows];
    return best->rows;
}

int32_t bn_repeats_draft(bn_session *s, int32_t token, int32_t most, bn_draft_budget *budget) {
    const bn_timings *timings = &s->model->timings;
    const int32_t n = s->position + 1;
    double probabilities[BN_GUESSES];
    s->tokens[s->position] = token;
    bn_repeats_see(&s->repeats, s->tokens, n);
    const int32_t guesses =
        bn_repeats_guess(&s->repeats, s->tokens, n, bn_smaller(most, BN_GUESSES), probabilities);
    bn_draft_plan own;
    if (worth(&s->repeats, timings, budget, probabilities, guesses, &own) < 1 ||
        (bn_can_guess(s) &&
         !bn_plan_is_better(&own, bn_plan_drafting(timings, budget, &s->draft_stats, most))))
        return 0;
    s->repeats.rests = 0;
    budget->rows += own.rows;
    budget->tokens = own.tokens;
    return own.rows;
}
