/* SPDX-License-Identifier: MIT
 *
 * float_rows.h: products of float rows and vectors by the float rule, and weighted sums of rows,
 * shared by the x86 tiers. PARTS registers hold the 16 lanes of the rule. Tails: see float.h.
 */
#ifndef BITNET_X86_FLOAT_ROWS_H
#define BITNET_X86_FLOAT_ROWS_H

#include "register.h"

INLINE vec load_f32(const void *p, size_t i) {
    return vec_load((const float *)p + i);
}
INLINE vec load_f16(const void *p, size_t i) {
    return vec_widen((const uint16_t *)p + i);
}
typedef vec load_fn(const void *p, size_t i);

/* Rows and tokens of a block, which share their loads: as many as there are registers for. */
enum { ROWS = 4, BLOCK = PARTS == 1 ? 4 : 1 };

/* The next BN_LANES terms of R rows and T tokens. */
INLINE void dot_step(vec sum[ROWS][BLOCK][PARTS], const uint8_t *w, size_t w_stride, load_fn *load,
                     const float *x, size_t x_stride, const size_t R, const size_t T) {
    UNROLL
    for (size_t p = 0; p < PARTS; p++) {
        vec v[BLOCK];
        UNROLL
        for (size_t t = 0; t < T; t++)
            v[t] = vec_load(x + t * x_stride + p * LANES);
        UNROLL
        for (size_t r = 0; r < R; r++) {
            const vec wr = load(w + r * w_stride, p * LANES);
            UNROLL
            for (size_t t = 0; t < T; t++)
                sum[r][t][p] = vec_fma(wr, v[t], sum[r][t][p]);
        }
    }
}

/* y[t][r] = w[r]·x[t] for R rows of `size`-byte elements and T tokens. */
INLINE void dot_block(float *y, size_t y_stride, const uint8_t *w, size_t size, load_fn *load,
                      size_t cols, const float *x, size_t x_stride, const size_t R,
                      const size_t T) {
    const size_t w_stride = cols * size;
    vec sum[ROWS][BLOCK][PARTS];
    size_t k = 0;
    UNROLL
    for (size_t r = 0; r < R; r++) {
        UNROLL
        for (size_t t = 0; t < T; t++) {
            UNROLL
            for (size_t p = 0; p < PARTS; p++)
                sum[r][t][p] = vec_zero();
        }
    }
    for (; k + BN_LANES <= cols; k += BN_LANES) {
        /* prefetch the next rows; with more tokens, products take longer than memory */
        for (size_t at = 0; R == ROWS && T == 1 && at < ROWS * BN_LANES * size; at += 64)
            __builtin_prefetch(w + ROWS * (w_stride + k * size) + at);
        dot_step(sum, w + k * size, w_stride, load, x + k, x_stride, R, T);
    }
    if (k < cols) {
        float x_end[BLOCK][BN_LANES] = {{0}}, w_end[ROWS][BN_LANES] = {{0}};
        for (size_t t = 0; t < T; t++)
            memcpy(x_end[t], x + t * x_stride + k, (cols - k) * sizeof *x);
        for (size_t r = 0; r < R; r++)
            memcpy(w_end[r], w + r * w_stride + k * size, (cols - k) * size);
        dot_step(sum, (const uint8_t *)w_end, sizeof *w_end, load, *x_end, BN_LANES, R, T);
    }
    UNROLL
    for (size_t r = 0; r < R; r++) {
        UNROLL
        for (size_t t = 0; t < T; t++)
            y[t * y_stride + r] = vec_tree(sum[r][t]);
    }
}

INLINE void row_products(float *y, size_t y_stride, const uint8_t *w, size_t size, load_fn *load,
                         size_t rows, size_t cols, const float *x, size_t x_stride, size_t tokens) {
    size_t r = 0;
    for (size_t n; r < rows; r += n) {
        const uint8_t *from = w + r * cols * size;
        size_t t = 0;
        n = rows - r < ROWS ? 1 : ROWS;
        for (; n == ROWS && t + BLOCK <= tokens; t += BLOCK)
            dot_block(y + t * y_stride + r, y_stride, from, size, load, cols, x + t * x_stride,
                      x_stride, ROWS, BLOCK);
        for (; n == ROWS && t < tokens; t++)
            dot_block(y + t * y_stride + r, 0, from, size, load, cols, x + t * x_stride, 0, ROWS,
                      1);
        for (; t < tokens; t++)
            dot_block(y + t * y_stride + r, 0, from, size, load, cols, x + t * x_stride, 0, 1, 1);
    }
}

static void f32_matmul(float *y, size_t y_stride, const float *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens) {
    row_products(y, y_stride, (const uint8_t *)w, sizeof *w, load_f32, rows, cols, x, x_stride,
                 tokens);
}

static void f16_matmul(float *y, size_t y_stride, const uint16_t *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens) {
    row_products(y, y_stride, (const uint8_t *)w, sizeof *w, load_f16, rows, cols, x, x_stride,
                 tokens);
}

/* R registers of outputs i on, for T tokens from t on, which share the widened weights. */
INLINE void add_rows_of(const bn_add_rows *a, size_t t, size_t i, const size_t T, const size_t R) {
    vec s[4][4];
    UNROLL
    for (size_t u = 0; u < T; u++) {
        UNROLL
        for (size_t j = 0; j < R; j++)
            s[u][j] = vec_zero();
    }
    for (size_t r = 0; r < a->rank; r++) {
        const int8_t *w = a->w + r * a->w_stride + i;
        vec v[4];
        UNROLL
        for (size_t at = 0; at < R * LANES; at += 64) /* one per cache line */
            __builtin_prefetch(w + 6 * R * LANES + at);
        UNROLL
        for (size_t j = 0; j < R; j++)
            v[j] = vec_from_int8(w + j * LANES);
        UNROLL
        for (size_t u = 0; u < T; u++) {
            const vec x = vec_set(a->x[(t + u) * a->x_stride + r]);
            UNROLL
            for (size_t j = 0; j < R; j++)
                s[u][j] = vec_fma(v[j], x, s[u][j]);
        }
    }
    UNROLL
    for (size_t u = 0; u < T; u++) {
        float *y = a->y + (t + u) * a->y_stride + i;
        UNROLL
        for (size_t j = 0; j < R; j++)
            vec_store(y + j * LANES,
                      vec_add(vec_load(y + j * LANES), vec_mul(s[u][j], vec_set(a->weight))));
    }
}

/* The same for one token and fewer than LANES outputs. */
static void add_rows_end(const bn_add_rows *a, size_t t, size_t i) {
    const size_t n = a->n - i;
    float *y = a->y + t * a->y_stride + i, y_end[LANES] = {0};
    vec s = vec_zero();
    for (size_t r = 0; r < a->rank; r++) {
        s = vec_fma(vec_from_int8(a->w + r * a->w_stride + i), vec_set(a->x[t * a->x_stride + r]),
                    s);
    }
    memcpy(y_end, y, n * sizeof *y);
    vec_store(y_end, vec_add(vec_load(y_end), vec_mul(s, vec_set(a->weight))));
    memcpy(y, y_end, n * sizeof *y);
}

static void int8_add_rows(const bn_add_rows *a) {
    for (size_t t = 0, T; t < a->tokens; t += T) {
        size_t i = 0;
        T = a->tokens - t >= 4 ? 4 : 1;
        for (; T == 4 && i + 2 * LANES <= a->n; i += 2 * LANES)
            add_rows_of(a, t, i, 4, 2);
        for (; T == 1 && i + 4 * LANES <= a->n; i += 4 * LANES)
            add_rows_of(a, t, i, 1, 4);
        for (; i < a->n; i += LANES)
            for (size_t u = t; u < t + T; u++)
                if (i + LANES <= a->n)
                    add_rows_of(a, u, i, 1, 1);
                else
                    add_rows_end(a, u, i);
    }
}

#endif
