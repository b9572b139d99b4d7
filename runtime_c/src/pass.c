/* SPDX-License-Identifier: MIT
 *
 * pass.c: see pass.h.
 */
#include "pass.h"

#include <string.h>

#include "linear/tiles.h"

void bn_each_row(const bn_pass *p, bn_task task, void *context) {
    if (p->rows == 1 || p->alone)
        task(context, 0, 0, p->rows);
    else
        bn_pool_run(p->w->in.pool, p->rows, p->rows, task, context);
}

void bn_fail_pass(bn_pass *p) {
    atomic_store_explicit(&p->not_finite, 1, memory_order_relaxed);
}

void bn_norm_checked(bn_pass *p, const bn_norm *norm, float *y, const float *x, size_t n) {
    if (!bn_norm_row(&p->m->kernels, norm, y, x, n))
        bn_fail_pass(p);
}

/* The scale of what is not finite is NaN or 0. */
void bn_quantize_row(bn_pass *p, size_t row, const bn_norm *norm, const float *from, size_t width,
                     const bn_tensor *linear) {
    const bn_workspace *w = p->w;
    const bn_norm own = bn_norm_before(linear, &p->stack->config);
    float *h = w->in.h + row * w->in.wide;
    if (norm->gain)
        bn_norm_checked(p, norm, h, from, width);
    else if (h != from)
        memcpy(h, from, width * sizeof *h);
    if (own.gain)
        bn_norm_checked(p, &own, h, h, width);
    w->in.s[row] = p->m->kernels.vectors.quantize(w->in.q + row * w->in.q_stride, &w->in.q_sum[row],
                                                  h, width, bn_q_row(width));
    if (!(w->in.s[row] > 0))
        bn_fail_pass(p);
    if (p->stack->grouped)
        bn_sum_groups(&w->in, row, width);
}

typedef struct quantize {
    bn_pass *p;
    const bn_norm *norm;
    const float *from; /* row 0 of the workspace */
    size_t stride, width;
    const bn_tensor *linear;
} quantize;

static void quantize_rows(void *context, int32_t thread, size_t first, size_t end) {
    const quantize *a = context;
    (void)thread;
    for (size_t row = a->p->first + first; row < a->p->first + end; row++)
        bn_quantize_row(a->p, row, a->norm, a->from + row * a->stride, a->width, a->linear);
}

void bn_quantize_x(bn_pass *p, const bn_norm *norm, const bn_tensor *linear) {
    const size_t D = p->stack->config.dim;
    bn_each_row(p, quantize_rows, &(quantize){p, norm, p->w->x, D, D, linear});
}

void bn_quantize_h(bn_pass *p, const bn_norm *norm, size_t width, const bn_tensor *linear) {
    bn_each_row(p, quantize_rows, &(quantize){p, norm, p->w->in.h, p->w->in.wide, width, linear});
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

void bn_add_row(bn_pass *p, const bn_norm *after, size_t row) {
    const bn_config *c = &p->stack->config;
    const int of_sum = (c->norm_flags & BN_RESIDUAL_NORM) != 0;
    float *y = p->w->y + row * c->dim, *x = p->w->x + row * c->dim;
    if (after->gain && !of_sum)
        bn_norm_checked(p, after, y, y, c->dim);
    p->m->kernels.vectors.add(x, y, c->residual_scale, c->dim);
    if (of_sum)
        bn_norm_checked(p, after, x, x, c->dim);
}

static void add_rows(void *context, int32_t thread, size_t first, size_t end) {
    const addition *a = context;
    (void)thread;
    for (size_t row = a->p->first + first; row < a->p->first + end; row++)
        bn_add_row(a->p, a->after, row);
}

void bn_add(bn_pass *p, const bn_tensor *linear, const bn_norm *after) {
    const bn_config *c = &p->stack->config;
    const int direct = after->gain == NULL;
    const size_t first = p->first * c->dim;
    const bn_product product = {.w = linear,
                                .y = (direct ? p->w->x : p->w->y) + first,
                                .y_stride = c->dim,
                                .accumulate = direct,
                                .scale = c->residual_scale};
    bn_linear(&p->w->in, p->first, p->rows, &product, 1);
    if (!direct)
        bn_each_row(p, add_rows, &(addition){p, after});
}
