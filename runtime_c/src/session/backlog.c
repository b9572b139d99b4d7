/* SPDX-License-Identifier: MIT
 *
 * backlog.c: see backlog.h.
 */
#include "backlog.h"

#include <string.h>

#include "forward.h"
#include "system/clock.h"

int bn_backlog_follows(const bn_session *s, int32_t position) {
    return s->stack->draft && s->drafted + s->pending == position;
}

float *bn_backlog_state(const bn_session *s, int32_t i) {
    return s->backlog + (size_t)i * s->stack->config.dim;
}

void bn_backlog_rows(bn_workspace *w, size_t first, bn_session *s, int32_t place, int32_t n,
                     const float *states, size_t stride) {
    for (int32_t i = 0; i < n; i++)
        w->rows[first + (size_t)i] = (bn_row){.session = s,
                                              .cache = &s->cache,
                                              .position = place + i,
                                              .token = s->tokens[place + i + 1],
                                              .state = states + (size_t)i * stride};
}

/* Compute n draft rows, in pieces. */
static bn_status run(bn_session *s, bn_workspace *w, int32_t place, int32_t n, const float *states,
                     size_t stride) {
    bn_status status = bn_cache_prepare(&s->cache, (size_t)place, (size_t)n);
    for (int32_t at = 0, rows; at < n && !status; at += rows) {
        rows = bn_smaller(n - at, s->batch);
        bn_backlog_rows(w, 0, s, place + at, rows, states + (size_t)at * stride, stride);
        status = bn_forward_keys(s->model, s->stack->draft, w, (size_t)rows);
    }
    return status;
}

void bn_backlog_shorten(bn_session *s, int32_t left) {
    s->drafted += s->pending - left;
    if (left > 0)
        memmove(s->backlog, bn_backlog_state(s, s->pending - left),
                (size_t)left * s->stack->config.dim * sizeof *s->backlog);
    s->pending = left;
}

void bn_backlog_take(bn_session *s, bn_workspace *w, int32_t left) {
    bn_timings *timings = &s->model->timings;
    const int32_t n = s->pending - left;
    const double begin = bn_seconds();
    if (run(s, w, s->drafted, n, s->backlog, s->stack->config.dim)) {
        s->pending = 0;
        return;
    }
    bn_backlog_shorten(s, left);
    if (n == BN_BACKLOG)
        bn_note_catch_up(timings, (bn_seconds() - begin) / n);
    bn_charge_catch_up(&s->draft_stats, timings, n);
}

void bn_backlog_begin(bn_session *s, bn_workspace *w, int32_t n, int32_t next) {
    if (!bn_backlog_follows(s, s->position) || s->pending == 0 || s->pending + n <= BN_BACKLOG)
        return;
    s->tokens[s->position] = next;
    bn_backlog_take(s, w, 0);
}

void bn_backlog_add(bn_session *s, int32_t place, const float *x) {
    if (!bn_backlog_follows(s, place) || s->pending == BN_BACKLOG)
        return;
    bn_norm_row(&s->model->kernels, &s->stack->final_norm, bn_backlog_state(s, s->pending), x,
                s->stack->config.dim);
    s->pending++;
}

void bn_backlog_end(bn_session *s, bn_workspace *w, size_t first, int32_t n) {
    const size_t D = s->stack->config.dim, stride = bn_row_stride(D);
    const int32_t place = s->position - n;
    const float *states = w->x + first * stride;
    if (!bn_backlog_follows(s, place))
        return;
    if (s->pending + n <= BN_BACKLOG) {
        for (int32_t i = 0; i < n; i++)
            bn_backlog_add(s, place + i, states + (size_t)i * stride);
        return;
    }
    /* each to the start of its draft row, so that no thread writes what another reads */
    for (int32_t i = 0; i < n; i++)
        bn_norm_row(&s->model->kernels, &s->stack->final_norm,
                    i < n - 1 ? w->x + (size_t)i * stride : s->backlog, states + (size_t)i * stride,
                    D);
    if (run(s, w, place, n - 1, w->x, stride))
        return;
    s->drafted = s->position - 1;
    s->pending = 1;
}
