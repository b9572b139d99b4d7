/* SPDX-License-Identifier: MIT
 *
 * batch.c: see batch.h.
 */
#include "batch.h"

#include <math.h>
#include <string.h>

#include "backlog.h"
#include "forward.h"
#include "head.h"
#include "screen.h"
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
                    .adapter = s->adapter ? &s->model->added[s->adapter - 1].adapter : NULL,
                    .position = before ? before->position + 1 : s->position,
                    .token = token,
                    .want = want};
    s->digests[row->position] = 0;
    if (s->cache.written <= (size_t)row->position)
        s->cache.written = (size_t)row->position + 1;
    b->n++;
    return row;
}

/* --- delivering what is wanted: all rows of a batch here want the same --- */

static float *state_of(const bn_batch *b, size_t row) {
    return b->w->x + row * bn_row_stride(b->stack->config.dim);
}

/* Hash of the bits of n floats; never 0. */
static uint64_t digest(const float *x, size_t n) {
    uint64_t hash = n;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        hash = (hash ^ bits) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    hash *= 0xbf58476d1ce4e5b9u;
    return (hash ^ hash >> 32) | !hash;
}

static void keep_hidden(const bn_batch *b, size_t row) {
    const bn_row *r = &b->w->rows[row];
    bn_session *s = r->session;
    const size_t D = b->stack->config.dim;
    memcpy(s->hidden, state_of(b, row), D * sizeof *s->hidden);
    s->digests[r->position] = digest(s->hidden, D);
    s->ready = BN_READY_HIDDEN;
}

static bn_status give_hidden(const bn_batch *b) {
    for (size_t row = 0; row < b->n; row++)
        keep_hidden(b, row);
    return BN_OK;
}

static bn_status give_pooled(const bn_batch *b) {
    const size_t D = b->stack->config.dim;
    for (size_t row = 0; row < b->n; row++) { /* before any pool changes */
        float *h = state_of(b, row);
        if (!bn_norm_row(&b->m->kernels, &b->stack->final_norm, h, h, D))
            return BN_ERR_NUMERIC;
    }
    for (size_t row = 0; row < b->n; row++) {
        const bn_row *r = &b->w->rows[row];
        float *pool = r->session->pool;
        const float *h = state_of(b, row);
        const int adds = r->session->pooling == BN_POOL_MEAN && r->position > 0;
        for (size_t d = 0; d < D; d++)
            pool[d] = adds ? pool[d] + h[d] : h[d];
    }
    return BN_OK;
}

static bn_status give_logits(const bn_batch *b) {
    const bn_status status = bn_head(b->m, b->stack, b->w, b->n, b->w->rows->out);
    return status ? status : give_hidden(b);
}

static bn_status give_probability(const bn_batch *b) {
    const size_t V = b->stack->config.vocab_size;
    for (size_t first = 0, rows; first < b->n; first += rows) {
        bn_workspace w = bn_workspace_from(b->w, first);
        rows = bn_min(b->n - first, w.score_rows);
        const bn_status status = bn_head(b->m, b->stack, &w, rows, w.scores);
        if (status)
            return status;
        for (size_t r = 0; r < rows; r++) {
            const bn_row *row = &w.rows[r];
            *row->out = bn_log_probability(&b->m->kernels, w.scores + r * V, V, row->next);
            if (!isfinite(*row->out)) /* as a logit is not */
                return BN_ERR_NUMERIC;
        }
    }
    return give_hidden(b);
}

/* Estimates if the head has a sketch, else logits. */
static bn_status give_scores(const bn_batch *b) {
    if (!bn_head_screens(b->stack))
        return bn_head(b->m, b->stack, b->w, b->n, b->w->scores);
    const bn_status status = bn_head_input(b->m, b->stack, b->w, b->n);
    if (!status)
        bn_head_estimate(b->m, b->stack, b->w, b->n, b->stack->config.vocab_size, b->w->scores);
    return status;
}

void bn_batch_take(const bn_batch *b, size_t row) {
    bn_session *s = b->w->rows[row].session;
    keep_hidden(b, row);
    bn_backlog_add(s, b->w->rows[row].position, s->hidden);
}

float *bn_batch_scores(const bn_batch *b, size_t row, int32_t *ready) {
    *ready = bn_head_screens(b->stack) ? BN_READY_ESTIMATES : BN_READY_LOGITS;
    return b->w->scores + row * b->stack->config.vocab_size;
}

/* --- running the rows --- */

/* Whether the rows are one text that had to come whole and exceeds its session's batch: it can then
 * be cancelled midway. The workspace may have more room because of other sessions. */
static int is_long_text(const bn_batch *b) {
    const bn_row *first = b->w->rows;
    return first->position == 0 && first->cache->prefix == b->n &&
           b->n > (size_t)first->session->batch;
}

/* Run the layers; skipped bytes of weights count for the first session. */
static bn_status forward(const bn_batch *b) {
    const size_t threads = (size_t)bn_pool_threads(b->m->pool);
    bn_session *s = b->w->rows[0].session;
    const bn_status status =
        bn_forward(b->m, b->stack, b->w, b->n, is_long_text(b) ? &s->cancelled : NULL);
    for (size_t i = 0; i < threads; i++)
        s->skipped += b->w->in.scratch.skipped[i];
    return status;
}

/* Number of rows from `first` on that want the same, at most what one step can process. */
static size_t count_alike(const bn_batch *b, size_t first) {
    const bn_row *rows = &b->w->rows[first];
    const size_t V = b->stack->config.vocab_size;
    size_t n = 1;
    while (first + n < b->n && n < b->w->batch && rows[n].want == rows->want &&
           (rows->want != BN_WANT_LOGITS || rows[n].out == rows[n - 1].out + V))
        n++;
    return n;
}

static bn_status give_wanted(const bn_batch *b) {
    static bn_status (*const give[])(const bn_batch *) = {
        [BN_WANT_POOLED] = give_pooled, [BN_WANT_HIDDEN] = give_hidden,
        [BN_WANT_LOGITS] = give_logits, [BN_WANT_PROBABILITY] = give_probability,
        [BN_WANT_SCORES] = give_scores,
    };
    bn_status status = BN_OK;
    for (size_t first = 0, n; first < b->n && !status; first += n) {
        const bn_want want = b->w->rows[first].want;
        bn_workspace w = bn_workspace_from(b->w, first);
        n = count_alike(b, first);
        const bn_batch alike = {.m = b->m, .stack = b->stack, .w = &w, .n = n};
        if (want != BN_WANT_NOTHING)
            status = give[want](&alike);
    }
    return status;
}

/* Allocate cache memory. */
static bn_status prepare(const bn_batch *b) {
    bn_status status = BN_OK;
    for (const bn_row *row = b->w->rows; row < b->w->rows + b->n && !status; row++)
        status = bn_cache_prepare(row->cache, (size_t)row->position, 1);
    return status;
}

bn_status bn_batch_run(bn_batch *b) {
    const bn_row *rows = b->w->rows;
    bn_status status = prepare(b);
    if (!status)
        status = forward(b);
    if (!status)
        status = give_wanted(b);
    for (size_t i = 0; i < b->n; i++) {
        bn_session *s = rows[i].session;
        if (!status) {
            s->tokens[rows[i].position] = rows[i].token;
            s->position = rows[i].position + 1;
        } else if (s->position == 0) {
            s->cache.prefix = s->cache.written = 0; /* the session stays empty */
        }
    }
    return status;
}

/* --- a whole text --- */

/* Progress through a text. */
typedef struct run {
    const bn_text *text;
    int32_t at;
    const float *vector; /* the next vector */
    bn_want each, last;
    float *out;
    size_t stride;
} run;

static void add_row(bn_batch *b, bn_session *s, run *r) {
    const bn_text *t = r->text;
    const int is_last = r->at + 1 == t->n;
    bn_row *row =
        bn_batch_add(b, s, t->tokens ? t->tokens[r->at] : BN_NO_TOKEN, is_last ? r->last : r->each);
    if (row->token == BN_NO_TOKEN) {
        row->vector = r->vector;
        r->vector += b->stack->config.dim;
    }
    row->out = r->out ? r->out + (size_t)r->at * r->stride : NULL;
    row->next = is_last || !t->tokens ? 0 : t->tokens[r->at + 1];
    r->at++;
}

/* Run up to token `end` of the text, in one turn. */
static bn_status run_block(bn_session *s, run *r, int32_t end, int32_t together) {
    bn_batch b = bn_batch_begin(s);
    bn_status status = BN_ERR_CANCELLED;
    if (!bn_session_cancelled(s)) {
        const int32_t n = end - r->at;
        const int follows = r->each != BN_WANT_PROBABILITY;
        s->cache.prefix = together ? (size_t)end : s->cache.prefix;
        if (follows)
            bn_backlog_begin(s, b.w, n, r->text->tokens ? r->text->tokens[r->at] : BN_NO_TOKEN);
        while (r->at < end)
            add_row(&b, s, r);
        status = bn_batch_run(&b);
        if (!status && follows)
            bn_backlog_end(s, b.w, 0, n);
    }
    bn_batch_end(&b);
    return status;
}

bn_status bn_run_text(bn_session *s, const bn_text *text, bn_want each, bn_want last, float *out,
                      size_t stride) {
    const int32_t together = text->prefix || s->stack->config.mask == BN_MASK_BIDIRECTIONAL;
    run r = {text, 0, text->vectors, each, last, out, stride};
    bn_status status = bn_session_reserve(s, text->n);
    if (status)
        return status;
    s->ready = BN_READY_NOTHING;
    while (r.at < text->n && !status) {
        const int32_t left = text->n - r.at;
        status =
            run_block(s, &r, together || left < s->batch ? text->n : r.at + s->batch, together);
    }
    if (status)
        s->ready = BN_READY_NOTHING;
    return status;
}
