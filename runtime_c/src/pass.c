/* SPDX-License-Identifier: MIT
 *
 * pass.c: see pass.h.
 */
#include "pass.h"

#include <string.h>

#include "linear/tiles.h"

enum { NORM_ROWS = 4 }; /* rows normalized at a time, to be quantized while in the cache */
enum { ALONE = 2048 };  /* floats of all rows */

int bn_runs_alone(const bn_pass *p) {
    return p->alone || p->rows == 1 || p->rows * p->stack->config.dim <= ALONE ||
           bn_pool_running(p->w->in.pool) == 1;
}

void bn_each_row(const bn_pass *p, bn_task task, void *context) {
    if (bn_runs_alone(p))
        task(context, 0, 0, p->rows);
    else
        bn_pool_run(p->w->in.pool, p->rows, p->rows, task, context);
}

void bn_fail_pass(bn_pass *p) {
    atomic_store_explicit(&p->not_finite, 1, memory_order_relaxed);
}

void bn_norm_checked(bn_pass *p, const bn_norm *norm, float *y, size_t y_stride, const float *x,
                     size_t x_stride, size_t n, size_t rows) {
    if (!bn_norm_rows(&p->m->kernels, norm, y, y_stride, x, x_stride, n, rows))
        bn_fail_pass(p);
}

int bn_keeps_h(const bn_pass *p, const bn_tensor *linear) {
    return p->stack->floats || linear->scale_scope == BN_SCALE_NONE;
}

/* A row that is not finite has the scale NaN or 0. */
static void quantize(bn_pass *p, size_t row, size_t n, const float *x, size_t stride,
                     size_t width) {
    const bn_operands *in = &p->w->in;
    p->m->kernels.vectors.quantize(&(bn_quantizing){.q = in->q + row * in->q_stride,
                                                    .s = in->s + row,
                                                    .sums = in->q_sum + row,
                                                    .x = x,
                                                    .q_stride = in->q_stride,
                                                    .x_stride = stride,
                                                    .n = width,
                                                    .rows = n});
    for (size_t i = row; i < row + n; i++) {
        if (!(in->s[i] > 0))
            bn_fail_pass(p);
        if (p->stack->grouped)
            bn_sum_groups(in, i, width);
    }
}

void bn_quantize_rows(bn_pass *p, size_t row, size_t n, const bn_norm *norm, const float *from,
                      size_t stride, size_t width, const bn_tensor *linear) {
    const bn_norm own = bn_norm_before(linear, &p->stack->config);
    const size_t wide = p->w->in.wide, first = row;
    const int keeps = bn_keeps_h(p, linear);
    for (size_t end = row + n, rows; row < end; row += rows, from += rows * stride) {
        float *h = p->w->in.h + (keeps ? row : first) * wide;
        const float *x = from;
        size_t x_stride = stride;
        rows = bn_min(end - row, NORM_ROWS);
        if (norm->gain)
            bn_norm_checked(p, norm, h, wide, x, x_stride, width, rows), x = h, x_stride = wide;
        for (size_t i = 0; i < rows && keeps && x != h; i++)
            memcpy(h + i * wide, x + i * x_stride, width * sizeof *h);
        if (own.gain)
            bn_norm_checked(p, &own, h, wide, x, x_stride, width, rows), x = h, x_stride = wide;
        quantize(p, row, rows, x, x_stride, width);
    }
}

typedef struct inputs {
    bn_pass *p;
    const bn_norm *norm;
    const float *from;
    size_t stride, width;
    const bn_tensor *linear;
} inputs;

static void quantize_rows(void *context, int32_t thread, size_t first, size_t end) {
    const inputs *a = context;
    const size_t row = a->p->first + first;
    (void)thread;
    bn_quantize_rows(a->p, row, end - first, a->norm, a->from + row * a->stride, a->stride,
                     a->width, a->linear);
}

void bn_quantize_x(bn_pass *p, const bn_norm *norm, const bn_tensor *linear) {
    const size_t D = p->stack->config.dim;
    bn_each_row(p, quantize_rows, &(inputs){p, norm, p->w->x, bn_row_stride(D), D, linear});
}

void bn_quantize_h(bn_pass *p, const bn_norm *norm, size_t width, const bn_tensor *linear) {
    bn_each_row(p, quantize_rows, &(inputs){p, norm, p->w->in.h, p->w->in.wide, width, linear});
}

void bn_project(bn_pass *p, const bn_norm *norm, const bn_product *products, int n) {
    const int together = products->w->norm ? 1 : n;
    for (int i = 0; i < n; i += together) {
        bn_quantize_x(p, norm, products[i].w);
        bn_linear(&p->w->in, p->first, p->rows, products + i, together);
    }
}

typedef struct addition {
    bn_pass *p;
    const bn_norm *after;
} addition;

void bn_sum_rows(bn_pass *p, const bn_norm *after, size_t row, size_t n) {
    const bn_config *c = &p->stack->config;
    const size_t D = c->dim, stride = bn_row_stride(D);
    const int of_sum = (c->norm_flags & BN_RESIDUAL_NORM) != 0;
    for (size_t end = row + n, rows; row < end; row += rows) {
        float *y = p->w->y + row * stride, *x = p->w->x + row * stride;
        rows = bn_min(end - row, NORM_ROWS);
        if (after->gain && !of_sum)
            bn_norm_checked(p, after, y, stride, y, stride, D, rows);
        for (size_t i = 0; i < rows; i++)
            p->m->kernels.vectors.add(x + i * stride, y + i * stride, c->residual_scale, D);
        if (after->gain && of_sum)
            bn_norm_checked(p, after, x, stride, x, stride, D, rows);
    }
}

static void add_rows(void *context, int32_t thread, size_t first, size_t end) {
    const addition *a = context;
    (void)thread;
    bn_sum_rows(a->p, a->after, a->p->first + first, end - first);
}

void bn_add(bn_pass *p, const bn_tensor *linear, const bn_norm *after) {
    const bn_config *c = &p->stack->config;
    const int direct = after->gain == NULL;
    const size_t stride = bn_row_stride(c->dim), first = p->first * stride;
    const bn_product product = {.w = linear,
                                .y = (direct ? p->w->x : p->w->y) + first,
                                .y_stride = stride,
                                .accumulate = direct,
                                .scale = c->residual_scale};
    bn_linear(&p->w->in, p->first, p->rows, &product, 1);
    if (!direct)
        bn_each_row(p, add_rows, &(addition){p, after});
}
