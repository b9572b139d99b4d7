/* SPDX-License-Identifier: MIT
 *
 * norms.h: norms of rows, shared by the x86 tiers. By the float rule a sum is one chain of
 * dependent additions, so NORM_ROWS rows are processed together.
 */
#ifndef BITNET_X86_NORMS_H
#define BITNET_X86_NORMS_H

#include "float.h"

enum { NORM_ROWS = 4 };

/* sum[r] += the next 16 elements of R rows, or the `left` last ones, minus mean[r] unless mean is
 * NULL, to the power 1 or 2. */
INLINE void add_powers(vec sum[][PARTS], const float *x, size_t stride, size_t left,
                       const vec *mean, const int power, const size_t R) {
    UNROLL
    for (size_t r = 0; r < R; r++) {
        UNROLL
        for (int p = 0; p < PARTS; p++) {
            const size_t n = left_from(left, p);
            vec v = vec_load_first(x + r * stride + p * LANES, n);
            if (mean)
                v = vec_first(vec_sub(v, mean[r]), n);
            sum[r][p] = power == 1 ? vec_add(sum[r][p], v) : vec_fma(v, v, sum[r][p]);
        }
    }
}

INLINE void row_sums(float *out, const float *x, size_t stride, size_t n, const vec *mean,
                     const int power, const size_t R) {
    vec sum[NORM_ROWS][PARTS];
    size_t i = 0;
    UNROLL
    for (size_t r = 0; r < R; r++)
        for (int p = 0; p < PARTS; p++)
            sum[r][p] = vec_zero();
    for (; i + BN_LANES <= n; i += BN_LANES)
        add_powers(sum, x + i, stride, BN_LANES, mean, power, R);
    if (i < n)
        add_powers(sum, x + i, stride, n - i, mean, power, R);
    UNROLL
    for (size_t r = 0; r < R; r++)
        out[r] = vec_tree(sum[r]);
}

/* Outputs i to i + n - 1 of R rows, n <= LANES. */
INLINE void norm_step(const bn_norming *a, float *y, const float *x, size_t i, size_t n,
                      const vec *mean, const vec *factor, const size_t R) {
    const vec gain = vec_load_first(a->gain + i, n);
    const vec bias = a->bias ? vec_load_first(a->bias + i, n) : vec_zero();
    UNROLL
    for (size_t r = 0; r < R; r++) {
        vec v = vec_load_first(x + r * a->x_stride + i, n);
        v = vec_mul(vec_mul(mean ? vec_sub(v, mean[r]) : v, factor[r]), gain);
        vec_store_first(y + r * a->y_stride + i, a->bias ? vec_add(v, bias) : v, n);
    }
}

/* R rows from `row` on. */
INLINE int norm_rows(const bn_norming *a, size_t row, const int layer, const size_t R) {
    const float *x = a->x + row * a->x_stride;
    float *y = a->y + row * a->y_stride, sum[NORM_ROWS];
    vec means[NORM_ROWS], factor[NORM_ROWS];
    const vec *mean = layer ? means : NULL;
    int finite = 1;
    if (layer)
        row_sums(sum, x, a->x_stride, a->n, NULL, 1, R);
    for (size_t r = 0; r < R && layer; r++)
        means[r] = vec_set(sum[r] / (float)a->n);
    row_sums(sum, x, a->x_stride, a->n, mean, 2, R);
    for (size_t r = 0; r < R; r++) {
        factor[r] = vec_set(1.0f / sqrtf(sum[r] / (float)a->n + a->eps));
        finite &= isfinite(sum[r]) != 0;
    }
    size_t i = 0;
    for (; i + LANES <= a->n; i += LANES)
        norm_step(a, y, x, i, LANES, mean, factor, R);
    if (i < a->n)
        norm_step(a, y, x, i, a->n - i, mean, factor, R);
    return finite;
}

INLINE int norm_all(const bn_norming *all, const int layer) {
    const bn_norming a = *all; /* local copy: stores cannot alias it */
    int finite = 1;
    size_t row = 0;
    for (; row + NORM_ROWS <= a.rows; row += NORM_ROWS)
        finite &= norm_rows(&a, row, layer, NORM_ROWS);
    for (; row < a.rows; row++)
        finite &= norm_rows(&a, row, layer, 1);
    return finite;
}

static int rms_norm(const bn_norming *a) {
    return norm_all(a, 0);
}

static int layer_norm(const bn_norming *a) {
    return norm_all(a, 1);
}

#endif
