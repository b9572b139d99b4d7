/* SPDX-License-Identifier: MIT
 *
 * exponential.h: activations and the exponentials of softmax, shared by the x86 tiers. Both are
 * long dependency chains, so STEP registers are processed together.
 */
#ifndef BITNET_X86_EXPONENTIAL_H
#define BITNET_X86_EXPONENTIAL_H

#include "float.h"

enum { STEP = LANES / 2, STEP_LANES = STEP * LANES };

/* bn_exp of every lane of `count` registers; see vectors.h. */
INLINE void exp_all(vec *x, int count) {
    static const float c[] = {BN_EXP_C5, BN_EXP_C4, BN_EXP_C3, BN_EXP_C2, 1.0f, 1.0f};
    vec n[STEP], p[STEP];
    UNROLL
    for (int j = 0; j < count; j++) {
        x[j] = vec_min(vec_set(BN_EXP_HI), vec_max(vec_set(BN_EXP_LO), x[j])); /* NaN passes */
        n[j] = vec_round(vec_mul(x[j], vec_set(BN_LOG2E)));
    }
    UNROLL
    for (int j = 0; j < count; j++) {
        x[j] = vec_fma(n[j], vec_set(-BN_LN2_HI), x[j]);
        p[j] = vec_set(BN_EXP_C6);
    }
    UNROLL
    for (int j = 0; j < count; j++)
        x[j] = vec_fma(n[j], vec_set(-BN_LN2_LO), x[j]);
    UNROLL
    for (size_t k = 0; k < sizeof c / sizeof *c; k++) {
        UNROLL
        for (int j = 0; j < count; j++)
            p[j] = vec_fma(p[j], x[j], vec_set(c[k]));
    }
    UNROLL
    for (int j = 0; j < count; j++)
        x[j] = vec_add_exponent(p[j], n[j]);
}

typedef void activation_fn(vec *g, int count);

/* h[i] = f(g[i]) * u[i], n <= STEP_LANES; a smaller n takes as long. */
INLINE void gate_step(float *h, const float *g, const float *u, size_t n, activation_fn *f) {
    vec x[STEP];
    UNROLL
    for (int j = 0; j < STEP; j++)
        x[j] = vec_load_first(g + j * LANES, left_from(n, j));
    f(x, STEP);
    UNROLL
    for (int j = 0; j < STEP; j++) {
        const size_t left = left_from(n, j);
        vec_store_first(h + j * LANES, vec_mul(x[j], vec_load_first(u + j * LANES, left)), left);
    }
}

INLINE void gate(float *h, const float *g, const float *u, size_t n, activation_fn *f) {
    size_t i = 0;
    for (; i + STEP_LANES <= n; i += STEP_LANES)
        gate_step(h + i, g + i, u + i, STEP_LANES, f);
    if (i < n)
        gate_step(h + i, g + i, u + i, n - i, f);
}

/* g / (1 + exp(z)) */
INLINE void divide(vec *g, vec *z, int count) {
    exp_all(z, count);
    UNROLL
    for (int j = 0; j < count; j++)
        g[j] = vec_div(g[j], vec_add(vec_set(1.0f), z[j]));
}

INLINE void silu(vec *g, int count) {
    vec z[STEP];
    UNROLL
    for (int j = 0; j < count; j++)
        z[j] = vec_negate(g[j]);
    divide(g, z, count);
}

static void silu_gate(float *h, const float *g, const float *u, size_t n) {
    gate(h, g, u, n, silu);
}

/* max(g, 0); NaN passes through. Adding zero turns -0 into +0. */
INLINE vec positive(vec g) {
    const vec zero = vec_zero();
    return vec_add(vec_max(zero, g), zero);
}

INLINE vec relu2_times(vec g, vec u) {
    const vec r = positive(g);
    return vec_mul(vec_mul(r, r), u);
}

static void relu2_gate(float *h, const float *g, const float *u, size_t n) {
    map(h, g, u, n, relu2_times);
}

INLINE void gelu(vec *g, int count) {
    vec z[STEP];
    UNROLL
    for (int j = 0; j < count; j++) {
        const vec c = vec_fma(vec_set(BN_GELU_C1), vec_mul(g[j], g[j]), vec_set(BN_GELU_C0));
        z[j] = vec_negate(vec_mul(g[j], c));
    }
    divide(g, z, count);
}

static void gelu_gate(float *h, const float *g, const float *u, size_t n) {
    gate(h, g, u, n, gelu);
}

INLINE vec relu_times(vec g, vec u) {
    return vec_mul(positive(g), u);
}

static void relu_gate(float *h, const float *g, const float *u, size_t n) {
    map(h, g, u, n, relu_times);
}

INLINE void gelu_erf(vec *g, int count) {
    vec a[STEP], tail[STEP];
    UNROLL
    for (int j = 0; j < count; j++) {
        a[j] = vec_min(vec_abs(g[j]), vec_set(BN_GELU_ERF_MOST));
        tail[j] = vec_set(bn_gelu_erf[BN_GELU_ERF_DEGREE]);
    }
    UNROLL
    for (int k = BN_GELU_ERF_DEGREE - 1; k >= 0; k--) {
        UNROLL
        for (int j = 0; j < count; j++)
            tail[j] = vec_fma(tail[j], a[j], vec_set(bn_gelu_erf[k]));
    }
    exp_all(tail, count);
    UNROLL
    for (int j = 0; j < count; j++)
        g[j] = vec_fma(vec_negate(a[j]), tail[j], positive(g[j]));
}

static void gelu_erf_gate(float *h, const float *g, const float *u, size_t n) {
    gate(h, g, u, n, gelu_erf);
}

/* x[i] = exp(x[i] - shift), n <= STEP_LANES; adds them to sum. */
INLINE void exp_step(vec *sum, float *x, size_t n, vec shift) {
    vec e[STEP];
    UNROLL
    for (int j = 0; j < STEP; j++)
        e[j] = vec_sub(vec_load_first(x + j * LANES, left_from(n, j)), shift);
    exp_all(e, STEP);
    UNROLL
    for (int j = 0; j < STEP; j++) {
        const size_t left = left_from(n, j);
        vec_store_first(x + j * LANES, e[j], left);
        sum[j % PARTS] = vec_add(sum[j % PARTS], vec_first(e[j], left));
    }
}

static float exp_sum(float *x, size_t n, float shift) {
    const vec shifts = vec_set(shift);
    vec sum[PARTS];
    size_t i = 0;
    for (int p = 0; p < PARTS; p++)
        sum[p] = vec_zero();
    for (; i + STEP_LANES <= n; i += STEP_LANES)
        exp_step(sum, x + i, STEP_LANES, shifts);
    if (i < n)
        exp_step(sum, x + i, n - i, shifts);
    return vec_tree(sum);
}

#endif
