/* SPDX-License-Identifier: MIT
 *
 * float.h: kernels on float vectors and conversions, shared by the x86 tiers. vec_max(a, b) is a >
 * b ? a : b, and so returns b if either is NaN; vec_min likewise.
 *
 * A tail shorter than a register is copied to a buffer padded with neutral values and goes through
 * the same code.
 */
#ifndef BITNET_X86_FLOAT_H
#define BITNET_X86_FLOAT_H

#include "register.h"

/* How many of n elements remain from the j-th register on. */
INLINE size_t left_from(size_t n, int j) {
    const size_t before = (size_t)j * LANES;
    return n > before ? n - before : 0;
}

/* --- elementwise --- */

typedef vec map_fn(vec a, vec b);

/* y[i] = f(a[i], b[i]) */
INLINE void map(float *y, const float *a, const float *b, size_t n, map_fn *f) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        vec_store(y + i, f(vec_load(a + i), vec_load(b + i)));
    if (i < n) {
        float a_end[LANES] = {0}, b_end[LANES] = {0};
        memcpy(a_end, a + i, (n - i) * sizeof *a);
        memcpy(b_end, b + i, (n - i) * sizeof *b);
        vec_store(a_end, f(vec_load(a_end), vec_load(b_end)));
        memcpy(y + i, a_end, (n - i) * sizeof *y);
    }
}

static float max_of(const float *x, size_t n) {
    enum { AT_ONCE = 4 }; /* independent chains */
    vec m[AT_ONCE];
    size_t i = 0;
    UNROLL
    for (int j = 0; j < AT_ONCE; j++)
        m[j] = vec_set(-INFINITY);
    for (; i + AT_ONCE * LANES <= n; i += AT_ONCE * LANES) {
        UNROLL
        for (int j = 0; j < AT_ONCE; j++)
            m[j] = vec_max(vec_load(x + i + j * LANES), m[j]);
    }
    for (; i + LANES <= n; i += LANES)
        m[0] = vec_max(vec_load(x + i), m[0]);
    float largest = vec_largest(vec_max(vec_max(m[0], m[1]), vec_max(m[2], m[3])));
    for (; i < n; i++)
        largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* --- conversions --- */

enum { QUANTIZE_ROWS = 4 };

/* The largest |x| of each of R rows, at least 1e-5. A single row has four independent chains. */
INLINE void most_of(float *most, const float *x, size_t stride, size_t n, const size_t R) {
    enum { CHAINS = 4 };
    const size_t each = CHAINS / R;
    vec m[CHAINS];
    size_t i = 0;
    UNROLL
    for (size_t j = 0; j < CHAINS; j++)
        m[j] = vec_set(1e-5f);
    for (; i + each * LANES <= n; i += each * LANES) {
        UNROLL
        for (size_t j = 0; j < CHAINS; j++)
            m[j] = vec_most(vec_abs(vec_load(x + j / each * stride + i + j % each * LANES)), m[j]);
    }
    for (; i < n; i += LANES) {
        UNROLL
        for (size_t r = 0; r < R; r++)
            m[r * each] = vec_most(vec_abs(vec_load_first(x + r * stride + i, n - i)), m[r * each]);
    }
    if (R == 1)
        m[0] = vec_most(vec_most(m[0], m[1]), vec_most(m[2], m[3]));
    UNROLL
    for (size_t r = 0; r < R; r++)
        most[r] = vec_most_of(m[r * each]);
}

/* Quantizes a row; returns the sum of its codes. */
INLINE int32_t quantize_row(int8_t *q, const float *x, size_t n, float s) {
    const vec scale = vec_set(s), low = vec_set(-127.0f); /* replaces NaN; no other x·s is lower */
    const size_t padded = bn_q_row(n);
    sums total[2] = {sums_zero(), sums_zero()}, codes[4];
    size_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        UNROLL
        for (size_t j = 0; j < 4; j++) {
            codes[j] = vec_to_int(vec_max(vec_mul(vec_load(x + i + j * LANES), scale), low));
            total[j % 2] = sums_add(total[j % 2], codes[j]);
        }
        sums_store_bytes4(q + i, codes);
    }
    for (; i < n; i += LANES) {
        const vec v = vec_max(vec_mul(vec_load_first(x + i, n - i), scale), low);
        *codes = vec_to_int(vec_first(v, n - i));
        *total = sums_add(*total, *codes);
        sums_store_bytes(q + i, *codes);
    }
    for (; i < padded; i += LANES) /* i and padded are multiples of LANES */
        sums_store_bytes(q + i, sums_zero());
    return sums_total(sums_add(total[0], total[1]));
}

/* Finds the scales of R rows, as independent chains, before their codes. */
INLINE void quantize_rows(const bn_quantizing *a, size_t row, const size_t R) {
    const size_t n = a->n, x_stride = a->x_stride, q_stride = a->q_stride;
    const float *x = a->x + row * x_stride;
    int8_t *q = a->q + row * q_stride;
    float *s = a->s + row, most[QUANTIZE_ROWS];
    int32_t *q_sums = a->sums + row;
    most_of(most, x, x_stride, n, R);
    UNROLL
    for (size_t r = 0; r < R; r++)
        most[r] = 127.0f / most[r];
    for (size_t r = 0; r < R; r++) {
        s[r] = most[r];
        q_sums[r] = quantize_row(q + r * q_stride, x + r * x_stride, n, most[r]);
    }
}

static void quantize(const bn_quantizing *a) {
    size_t row = 0;
    for (; row + QUANTIZE_ROWS <= a->rows; row += QUANTIZE_ROWS)
        quantize_rows(a, row, QUANTIZE_ROWS);
    for (; row < a->rows; row++)
        quantize_rows(a, row, 1);
}

static void f32_to_f16(uint16_t *y, const float *x, size_t n) {
    const vec low = vec_set(-65504.0f), high = vec_set(65504.0f);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        vec_narrow(y + i, vec_min(high, vec_max(low, vec_load(x + i)))); /* NaN passes */
    if (i < n) {
        float end[LANES] = {0};
        uint16_t half[LANES];
        memcpy(end, x + i, (n - i) * sizeof *x);
        vec_narrow(half, vec_min(high, vec_max(low, vec_load(end))));
        memcpy(y + i, half, (n - i) * sizeof *y);
    }
}

static void f16_to_f32(float *y, const uint16_t *x, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        vec_store(y + i, vec_widen(x + i));
    if (i < n) {
        uint16_t half[LANES] = {0};
        float end[LANES];
        memcpy(half, x + i, (n - i) * sizeof *x);
        vec_store(end, vec_widen(half));
        memcpy(y + i, end, (n - i) * sizeof *y);
    }
}

#endif
