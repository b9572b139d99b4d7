/* SPDX-License-Identifier: MIT
 *
 * trail.c: see trail.h.
 */
#include "trail.h"

#include <string.h>

#include "forward.h"

int bn_trail_follows(const bn_session *s, int32_t position) {
    return s->stack->draft && s->drafted + s->trailing == position;
}

float *bn_trail_state(const bn_session *s, int32_t i) {
    return s->trail + (size_t)i * s->stack->config.dim;
}

void bn_trail_rows(bn_workspace *w, size_t first, bn_session *s, int32_t place, int32_t n,
                   const float *states) {
    for (int32_t i = 0; i < n; i++)
        w->rows[first + (size_t)i] = (bn_row){.session = s,
                                              .cache = &s->cache,
                                              .position = place + i,
                                              .token = s->tokens[place + i + 1],
                                              .state = states + (size_t)i * s->stack->config.dim};
}

/* Compute n draft rows, in pieces. */
static bn_status run(bn_session *s, bn_workspace *w, int32_t place, int32_t n,
                     const float *states) {
    bn_status status = bn_cache_prepare(&s->cache, (size_t)place, (size_t)n);
    for (int32_t at = 0, rows; at < n && !status; at += rows) {
        rows = bn_smaller(n - at, s->batch);
        bn_trail_rows(w, 0, s, place + at, rows, states + (size_t)at * s->stack->config.dim);
        status = bn_forward_keys(s->model, s->stack->draft, w, (size_t)rows);
    }
    return status;
}

void bn_trail_shorten(bn_session *s, int32_t left) {
    s->drafted += s->trailing - left;
    if (left > 0)
        memmove(s->trail, bn_trail_state(s, s->trailing - left),
                (size_t)left * s->stack->config.dim * sizeof *s->trail);
    s->trailing = left;
}

void bn_trail_take(bn_session *s, bn_workspace *w, int32_t left) {
    bn_pace *pace = &s->model->pace;
    const int32_t n = s->trailing - left;
    const double begin = bn_seconds();
    if (run(s, w, s->drafted, n, s->trail)) {
        s->trailing = 0;
        return;
    }
    bn_trail_shorten(s, left);
    if (n == BN_TRAIL)
        bn_pace_note_keep(pace, (bn_seconds() - begin) / n);
    bn_luck_keep(&s->luck, pace, n);
}

void bn_trail_begin(bn_session *s, bn_workspace *w, int32_t n, int32_t next) {
    if (!bn_trail_follows(s, s->position) || s->trailing == 0 || s->trailing + n <= BN_TRAIL)
        return;
    s->tokens[s->position] = next;
    bn_trail_take(s, w, 0);
}

void bn_trail_add(bn_session *s, int32_t place, const float *x) {
    if (!bn_trail_follows(s, place) || s->trailing == BN_TRAIL)
        return;
    bn_norm_row(&s->model->kernels, &s->stack->final_norm, bn_trail_state(s, s->trailing), x,
                s->stack->config.dim);
    s->trailing++;
}

void bn_trail_end(bn_session *s, bn_workspace *w, size_t first, int32_t n) {
    const size_t D = s->stack->config.dim;
    const int32_t place = s->position - n;
    const float *states = w->x + first * D;
    if (!bn_trail_follows(s, place))
        return;
    if (s->trailing + n <= BN_TRAIL) {
        for (int32_t i = 0; i < n; i++)
            bn_trail_add(s, place + i, states + (size_t)i * D);
        return;
    }
    /* each to the start of its draft row, so that no thread writes what another reads */
    for (int32_t i = 0; i < n; i++)
        bn_norm_row(&s->model->kernels, &s->stack->final_norm,
                    i < n - 1 ? w->x + (size_t)i * D : s->trail, states + (size_t)i * D, D);
    if (run(s, w, place, n - 1, w->x))
        return;
    s->drafted = s->position - 1;
    s->trailing = 1;
}
