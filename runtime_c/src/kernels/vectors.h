/* SPDX-License-Identifier: MIT
 *
 * vectors.h: what is done to one vector of floats between products: quantized, normed, softened,
 * activated.
 */
#ifndef BITNET_KERNELS_VECTORS_H
#define BITNET_KERNELS_VECTORS_H

#include "shapes.h"

/* h[i] = act(g[i]) * u[i]; h may be g. */
typedef void bn_gate(float *h, const float *g, const float *u, size_t n);

typedef struct bn_vector_kernels {
    /* s = 127 / max(max|x|, 1e-5); q[i] = clamp(round_half_even(x[i] * s), -127, 127);
     * q[n..padded) = 0. Returns s; *sum = sum of q. Where an x is NaN, s is; q then has some
     * value in its range. An infinity makes s 0. x is 4-byte aligned, q 64-byte aligned. */
    float (*quantize)(int8_t *q, int32_t *sum, const float *x, size_t n, size_t padded);

    /* y[i] = (x[i] * r) * gain[i], r = 1 / sqrt(sum(x²)/n + eps), float rule. y may be x.
     * Returns sum(x²), so that the caller sees NaN and infinity. */
    float (*rms_norm)(float *y, const float *x, const float *gain, size_t n, float eps);

    /* Largest of x[0..n), n >= 1; NaN ignored unless all are (then -INFINITY). A largest
     * zero may have either sign. */
    float (*max)(const float *x, size_t n);

    /* x[i] = exp(x[i] - shift); returns the sum, lanes and tree of the float rule (adds). */
    float (*exp_sum)(float *x, size_t n, float shift);

    /* Of the four gates and of exp, NaN gives NaN. */
    bn_gate *relu2_gate; /* (max(g, 0)²) * u */
    bn_gate *silu_gate;  /* (g / (1 + exp(-g))) * u */
    /* GELU with tanh: (g / (1 + exp(-g · fma(C1, g·g, C0)))) * u, as (1 + tanh z)/2 is
     * 1/(1 + exp(-2z)) and z = sqrt(2/pi)·(g + 0.044715·g³) */
    bn_gate *gelu_gate;
    bn_gate *relu_gate; /* max(g, 0) * u */
} bn_vector_kernels;

/* exp(x) for one x, the polynomial every tier evaluates (scalar/vectors.c): clamp x to
 * [-86, 88], NaN stays NaN; n = rint(x * log2 e); r = fma(n, -ln2_hi, x); r = fma(n, -ln2_lo, r); a
 * polynomial of degree 6 in r by Horner and fma; times 2^n by adding n to the exponent. */
float bn_exp(float x);

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
#define BN_GELU_C1 0.0713548163f /* 0.044715 of it */

#endif
