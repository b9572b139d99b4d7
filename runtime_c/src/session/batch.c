/* SPDX-License-Identifier: MIT
 *
 * batch.c: see batch.h.
 */
#include "batch.h"

#include <string.h>

#include "forward.h"
#include "head.h"
#include "session.h"
#include "turn.h"

bn_batch bn_batch_begin(const bn_session *s) {
    return (bn_batch){.m = s->model, .stack = s->stack, .w = bn_turn_begin(s->model)};
}

void bn_batch_end(bn_batch *b) {
    bn_turn_end(b->m);
    *b = (bn_batch){0};
}

bn_row *bn_batch_add(bn_batch *b, bn_session *s, int32_t token, bn_want want) {
    bn_row *row = &b->w->rows[b->n];
    const bn_row *before = b->n > 0 && row[-1].session == s ? row - 1 : NULL;
    *row = (bn_row){.session = s,
                    .cache = &s->cache,
                    .position = before ? before->position + 1 : s->position,
                    .token = token,
                    .want = want};
    b->n++;
    return row;
}

/* --- what is wanted: of rows [first, first + n), which want the same --- */

static float *state_of(const bn_batch *b, size_t row) {
    return b->w->x + row * b->stack->config.dim;
}

static void keep_hidden(const bn_batch *b, size_t row) {
    bn_session *s = b->w->rows[row].session;
    memcpy(s->hidden, state_of(b, row), b->stack->config.dim * sizeof *s->hidden);
    s->ready = BN_READY_HIDDEN;
}

static bn_status give_hidden(const bn_batch *b, size_t first, size_t n) {
    for (size_t row = first; row < first + n; row++)
        keep_hidden(b, row);
    return BN_OK;
}

static bn_status give_pooled(const bn_batch *b, size_t first, size_t n) {
    const size_t D = b->stack->config.dim;
    for (size_t row = first; row < first + n; row++) {
        const bn_row *r = &b->w->rows[row];
        float *pool = r->session->pool, *h = b->w->in.h;
        if (!bn_norm_row(&b->m->kernels, &b->stack->final_norm, h, state_of(b, row), D))
            return BN_ERR_NUMERIC;
        if (r->session->pooling == BN_POOL_MEAN && r->position > 0)
            for (size_t d = 0; d < D; d++)
                pool[d] += h[d];
        else
            memcpy(pool, h, D * sizeof *h);
    }
    return BN_OK;
}

static bn_status give_logits(const bn_batch *b, size_t first, size_t n) {
    const bn_status status = bn_head(b->m, b->stack, b->w, first, n, b->w->rows[first].out);
    return status ? status : give_hidden(b, first, n);
}

static bn_status give_probability(const bn_batch *b, size_t first, size_t n) {
    const size_t V = b->stack->config.vocab_size;
    float *scores = b->w->scores;
    for (size_t i = 0, rows; i < n; i += rows) {
        rows = n - i < b->w->score_rows ? n - i : b->w->score_rows;
        const bn_status status = bn_head(b->m, b->stack, b->w, first + i, rows, scores);
        if (status)
            return status;
        for (size_t r = 0; r < rows; r++) {
            const bn_row *row = &b->w->rows[first + i + r];
            *row->out = bn_log_probability(&b->m->kernels, scores + r * V, V, row->next);
        }
    }
    return give_hidden(b, first, n);
}

/* Estimates, if the sampler can do with them. */
static bn_status give_scores(const bn_batch *b, size_t first, size_t n) {
    float *scores = b->w->scores + first * b->stack->config.vocab_size;
    if (!bn_head_screens(b->stack))
        return bn_head(b->m, b->stack, b->w, first, n, scores);
    const bn_status status = bn_head_input(b->m, b->stack, b->w, first, n);
    if (!status)
        bn_head_estimate(b->m, b->stack, b->w, first, n, scores);
    return status;
}

void bn_batch_take(const bn_batch *b, size_t row) {
    const size_t V = b->stack->config.vocab_size;
    bn_session *s = b->w->rows[row].session;
    keep_hidden(b, row);
    memcpy(s->logits, b->w->scores + row * V, V * sizeof *s->logits);
    s->ready = bn_head_screens(b->stack) ? BN_READY_ESTIMATES : BN_READY_LOGITS;
}

/* --- the rows --- */

/* Whether a row is given what it wants together with the one before. */
static int joins(const bn_batch *b, const bn_row *row) {
    return row->want == row[-1].want &&
           (row->want != BN_WANT_LOGITS || row->out == row[-1].out + b->stack->config.vocab_size);
}

/* Through the layers; bytes of weights left out there count for the first session. */
static bn_status forward(const bn_batch *b) {
    const size_t threads = (size_t)bn_pool_threads(b->m->pool);
    memset(b->w->in.skipped, 0, threads * sizeof *b->w->in.skipped);
    const bn_status status = bn_forward(b->m, b->stack, b->w, b->n);
    for (size_t i = 0; i < threads; i++)
        b->w->rows[0].session->skipped += b->w->in.skipped[i];
    return status;
}

bn_status bn_batch_run(bn_batch *b) {
    static bn_status (*const give[])(const bn_batch *, size_t first, size_t n) = {
        [BN_WANT_POOLED] = give_pooled, [BN_WANT_HIDDEN] = give_hidden,
        [BN_WANT_LOGITS] = give_logits, [BN_WANT_PROBABILITY] = give_probability,
        [BN_WANT_SCORES] = give_scores,
    };
    const bn_row *rows = b->w->rows;
    bn_status status = forward(b);
    for (size_t first = 0, end; first < b->n && !status; first = end) {
        const bn_want want = rows[first].want;
        for (end = first + 1; end < b->n && joins(b, &rows[end]);)
            end++;
        if (want != BN_WANT_NOTHING)
            status = give[want](b, first, end - first);
    }
    for (size_t i = 0; i < b->n && !status; i++) {
        rows[i].session->tokens[rows[i].position] = rows[i].token;
        rows[i].session->position = rows[i].position + 1;
    }
    return status;
}

/* --- a text --- */

typedef struct text {
    const int32_t *tokens;
    int32_t n;
    bn_want each, last;
    float *out;
    size_t stride;
} text;

/* Tokens [i, end) of it, in a turn. */
static bn_status run_block(bn_session *s, const text *t, int32_t i, int32_t end) {
    bn_batch b = bn_batch_begin(s);
    for (; i < end; i++) {
        const int is_last = i + 1 == t->n;
        bn_row *row = bn_batch_add(&b, s, t->tokens[i], is_last ? t->last : t->each);
        row->out = t->out ? t->out + (size_t)i * t->stride : NULL;
        row->next = is_last ? 0 : t->tokens[i + 1];
    }
    const bn_status status = bn_session_cancelled(s) ? BN_ERR_CANCELLED : bn_batch_run(&b);
    bn_batch_end(&b);
    return status;
}

bn_status bn_run_text(bn_session *s, const int32_t *tokens, int32_t n, bn_want each, bn_want last,
                      float *out, size_t stride) {
    const text t = {tokens, n, each, last, out, stride};
    bn_status status = BN_OK;
    s->ready = BN_READY_NOTHING;
    for (int32_t i = 0, end; i < n && !status; i = end) {
        end = n - i < s->batch ? n : i + s->batch;
        status = run_block(s, &t, i, end);
    }
    if (status)
        s->ready = BN_READY_NOTHING;
    return status;
}
