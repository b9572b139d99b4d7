/* SPDX-License-Identifier: MIT
 *
 * step.c: tokens that a session chooses, as many in a pass as were guessed right.
 */
#include "batch.h"
#include "choose.h"
#include "guess.h"
#include "sampler.h"

/* What is computed: a token that is sure, and guesses of those behind it. */
typedef struct plan {
    int32_t token;
    const int32_t *guesses; /* the caller's, or these: */
    int32_t n, own[BN_PACE_ROWS];
    float confidences[BN_PACE_ROWS];
    int32_t made; /* by the draft */
    double begin, guessing;
} plan;

/* For the i-th token that a call chooses. */
static bn_sampler nth(const bn_sampler *sampler, size_t i, uint32_t vocab) {
    bn_sampler s = bn_sampler_or_neutral(sampler);
    if (s.allowed)
        s.allowed += i * ((vocab + 31) / 32);
    return s;
}

/* Whether sampling gives this token too. If not, the next step goes on from here. */
static int agrees(const bn_batch *b, size_t row, const bn_sampler *sampler, int32_t expected) {
    bn_session *s = b->w->rows[row].session;
    const bn_sampler next = nth(sampler, row + 1, s->stack->config.vocab_size);
    int32_t token;
    if (!bn_session_cancelled(s) && !bn_choose(s, b->w, &next, &token) && token == expected)
        return 1;
    bn_batch_take(b, row);
    return 0;
}

/* Guesses of the caller, if the first is the token that is sure; else of the draft. */
static void guess(bn_session *s, bn_workspace *w, const bn_sampler *sampler, const int32_t *draft,
                  int32_t n_draft, int32_t most, plan *p) {
    const int allowed = sampler && sampler->allowed; /* of a text that the draft does not know */
    if (n_draft > 0 && draft[0] == p->token) {
        p->guesses = draft + 1;
        p->n = n_draft < most ? n_draft - 1 : most - 1;
        return;
    }
    most = most < BN_PACE_ROWS ? most : BN_PACE_ROWS;
    if (!s->stack->draft || allowed || most < 2 || bn_session_reserve(s, most))
        return;
    p->guessing = bn_seconds();
    p->guesses = p->own;
    p->n = bn_guess(s, w, sampler, p->token, most - 1, 1, p->own, p->confidences, &p->made);
    p->guessing = bn_seconds() - p->guessing;
}

/* Compute all, then keep what sampling agrees with. */
static bn_status verify(bn_batch *b, bn_session *s, const bn_sampler *sampler, const plan *p,
                        int32_t *tokens, int32_t *n) {
    const int32_t start = s->position;
    bn_trail_begin(s, b->w, 1 + p->n, p->token);
    s->ready = BN_READY_NOTHING;
    for (int32_t i = 0; i <= p->n; i++)
        bn_batch_add(b, s, i > 0 ? p->guesses[i - 1] : p->token, BN_WANT_SCORES);
    const bn_status status = bn_batch_run(b);
    s->position = start;
    for (int32_t i = 0; i <= p->n && !status; i++) {
        s->position = start + i + 1;
        bn_batch_take(b, (size_t)i);
        tokens[i] = s->tokens[start + i];
        *n = i + 1;
        if (i == p->n || !agrees(b, (size_t)i, sampler, p->guesses[i]))
            break;
    }
    return status;
}

/* For the next time. */
static void learn(bn_session *s, const plan *p, int32_t n) {
    for (int32_t i = 0; i < p->n && i < n && p->made > 0; i++)
        bn_luck_note(&s->luck, (double)p->confidences[i], i + 1 < n);
    bn_pace_note(&s->model->pace, p->n, bn_seconds() - p->begin, p->made, p->guessing);
}

static bn_status step(bn_batch *b, bn_session *s, const bn_sampler *sampler, const int32_t *draft,
                      int32_t n_draft, int32_t *tokens, int32_t most, int32_t *n) {
    plan p = {.begin = bn_seconds()};
    bn_status status = bn_choose(s, b->w, sampler, &p.token);
    if (!status)
        status = bn_check_tokens(s, &p.token, 1);
    if (status)
        return status;
    guess(s, b->w, sampler, draft, n_draft, most, &p);
    if (p.n > 0)
        status = bn_check_tokens(s, p.guesses, p.n);
    if (p.n > 0 && bn_session_reserve(s, 1 + p.n))
        p.n = 0; /* one may fit */
    if (!status && p.n == 0)
        status = bn_session_reserve(s, 1);
    if (!status)
        status = verify(b, s, sampler, &p, tokens, n);
    if (!status && s->stack->draft)
        learn(s, &p, *n);
    return status;
}

static int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

bn_status bn_session_step(bn_session *s, const bn_sampler *sampler, const int32_t *draft,
                          int32_t n_draft, int32_t *tokens, int32_t most, int32_t *n) {
    BN_STANDARD_FLOATS;
    if (!s || !tokens || !n || most < 1 || n_draft < 0 || (n_draft > 0 && !draft))
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    if (bn_check_follows(s))
        return BN_ERR_MASK;
    if (s->position == s->n_ctx)
        return BN_ERR_CONTEXT;
    if (s->ready == BN_READY_NOTHING)
        return BN_ERR_STATE;
    most = smaller(
        most, smaller(s->n_ctx - s->position, (int32_t)bn_score_rows(s->stack, (size_t)s->batch)));
    if (s->stack->draft)
        most = smaller(most, BN_TRAIL);
    bn_batch b = bn_batch_begin(s);
    const bn_status status = step(&b, s, sampler, draft, n_draft, tokens, most, n);
    bn_batch_end(&b);
    return status;
}
