/* SPDX-License-Identifier: MIT
 *
 * vectors.h: operations on float vectors between products: quantization, norms, softmax,
 * activations, and selection of logits.
 */
#ifndef BITNET_KERNELS_VECTORS_H
#define BITNET_KERNELS_VECTORS_H

#include "products.h"

/* h[i] = act(g[i]) * u[i]; h may be g. */
typedef void bn_gate(float *h, const float *g, const float *u, size_t n);

/* Rows of n floats, n >= 1: y[i] = x[i] * r * gain[i] + bias[i], r = 1 / sqrt(sum(x²)/n + eps),
 * float rule; a NULL bias adds nothing. y may be x if the strides are equal. layer_norm first
 * subtracts the mean, sum(x)/n, from x. */
typedef struct bn_norming {
    float *y;
    const float *x;
    size_t y_stride, x_stride; /* in floats */
    const float *gain, *bias;
    size_t n, rows;
    float eps;
} bn_norming;

/* Rows of n floats: s = 127 / max(max|x|, 1e-5); q[i] = clamp(round_half_even(x[i] * s), -127,
 * 127); q is 0 from n to bn_q_row(n); sums[row] is the sum of q. A NaN in x makes s NaN and q
 * arbitrary values in range; an infinity makes s 0. x is 4-byte aligned, rows of q are 64-byte
 * aligned. */
typedef struct bn_quantizing {
    int8_t *q;
    float *s;      /* [rows] */
    int32_t *sums; /* [rows] */
    const float *x;
    size_t q_stride, x_stride; /* in elements */
    size_t n, rows;
} bn_quantizing;

/* Estimates of n logits from the head's sketch (screen.c), bn_estimated, and upper bounds on the
 * exact logits, bn_at_most. Every sum and product is rounded to float. */
typedef struct bn_estimates {
    float *y;
    const int32_t *acc;
    const float *step, *deviation, *scales; /* [n] of the head's rows */
    float mean, unit, rounding, noise;
    size_t n;
} bn_estimates;

static inline float bn_estimated(const bn_estimates *a, size_t i) {
    return ((float)a->acc[i] - a->mean) * a->step[i] * (a->scales[i] * a->unit);
}

static inline float bn_at_most(const bn_estimates *a, size_t i) {
    return a->y[i] + (a->deviation[i] + a->rounding) * a->scales[i] * a->noise;
}

/* Returns 0 if any sum(x²) is not finite: an x is not finite, or so large that its square
 * overflows. */
typedef int bn_normalize(const bn_norming *a);

typedef struct bn_vector_kernels {
    /* See bn_scaling in products.h. */
    void (*scale_sums)(const bn_scaling *a);

    /* y[i] += x[i] * weight, rounded twice */
    void (*add)(float *y, const float *x, float weight, size_t n);

    void (*quantize)(const bn_quantizing *a);

    bn_normalize *rms_norm;
    bn_normalize *layer_norm;

    /* Largest of x[0..n), n >= 1, ignoring NaN; -INFINITY if all are NaN. A zero result may have
     * either sign. */
    float (*max)(const float *x, size_t n);

    /* Writes to list, in ascending order, the i with x[i] >= bar or NaN, and returns their number.
     * list has room for n entries, n <= 2^32. */
    size_t (*reaching)(uint32_t *list, const float *x, float bar, size_t n);

    /* y[i] = bn_estimated(a, i) */
    void (*estimate)(const bn_estimates *a);

    /* As `reaching`, for bn_at_most(a, i). */
    size_t (*may_reach)(uint32_t *list, const bn_estimates *a, float bar);

    /* u[i] = noise of tokens[i] at `position` (noise.h) */
    void (*noise)(double *u, const uint32_t *tokens, size_t n, uint64_t seed, uint32_t position);

    /* x[i] = exp(x[i] - shift); returns their sum, with the lanes and tree of the float rule but
     * plain additions. */
    float (*exp_sum)(float *x, size_t n, float shift);

    /* In the gates and exp_sum, NaN gives NaN. */
    bn_gate *relu2_gate; /* (max(g, 0)²) * u */
    bn_gate *silu_gate;  /* (g / (1 + exp(-g))) * u */
    /* GELU with tanh: (g / (1 + exp(-g · fma(C1, g·g, C0)))) * u, as (1 + tanh z)/2 is
     * 1/(1 + exp(-2z)) and z = sqrt(2/pi)·(g + 0.044715·g³) */
    bn_gate *gelu_gate;
    bn_gate *relu_gate; /* max(g, 0) * u */
    /* Exact GELU, g·Φ(g) = max(g, 0) - a·Φ(-a), a = |g|: fma(-a, exp(Q), max(g, 0)) * u with a
     * clamped to BN_GELU_ERF_MOST and Q ≈ ln Φ(-a) a polynomial by Horner and fma. The error before
     * multiplying by u is less than 1e-7·max(1, a). */
    bn_gate *gelu_erf_gate;
} bn_vector_kernels;

/* exp(x) by the polynomial that every tier evaluates (scalar/vectors.c): clamp x to [-86, 88], NaN
 * stays NaN; n = rint(x * log2 e); r = fma(n, -ln2_hi, x); r = fma(n, -ln2_lo, r); a polynomial of
 * degree 6 in r by Horner and fma; times 2^n by adding n to the exponent. */
float bn_exp(float x);

/* cap · tanh(x / cap) */
static inline float bn_soft_cap(float x, float cap) {
    return cap * (1 - 2 / (bn_exp(x / cap * 2) + 1));
}

#define BN_EXP_LO (-86.0f)
#define BN_EXP_HI 88.0f
#define BN_LOG2E 1.44269504088896341f
#define BN_LN2_HI 0.693359375f
#define BN_LN2_LO (-2.12194440e-4f)
/* exp(r) = 1 + r + r² (C2 + r (C3 + r (C4 + r (C5 + r C6)))), Taylor: |r| <= ln2/2, 1.2e-7
 * relative. */
#define BN_EXP_C2 0.5f
#define BN_EXP_C3 0.166666672f
#define BN_EXP_C4 0.0416666679f
#define BN_EXP_C5 0.00833333377f
#define BN_EXP_C6 0.00138888892f
#define BN_GELU_C0 1.59576912f   /* 2 sqrt(2/pi) */
#define BN_GELU_C1 0.0713548163f /* 0.044715 · BN_GELU_C0 */
/* Minimax polynomial for ln Φ(-a), 0 <= a <= 9, with an error e weighted by max(Φ(-a), 1e-5): 9e-9.
 * Beyond 9, a·Φ(-a) is below 1.1e-18. */
#define BN_GELU_ERF_MOST 9.0f
enum { BN_GELU_ERF_DEGREE = 10 };
static const float bn_gelu_erf[BN_GELU_ERF_DEGREE + 1] = {
    -0.693147182f,    -0.797885776f,    -0.318296432f,    -0.0363896415f,
    0.00488612801f,   -6.95480121e-05f, -0.000153935354f, 3.94516755e-05f,
    -4.96162374e-06f, 3.2474361e-07f,   -8.75169359e-09f};

#endif
