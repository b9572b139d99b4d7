/* SPDX-License-Identifier: MIT
 *
 * training_rows.h: numbers and sums of the kernels in training_loops.h.
 */
#ifndef BITNET_TRAINING_ROWS_H
#define BITNET_TRAINING_ROWS_H

#include "inline.h"
#include "scalar/scalar.h" /* tree */

/* --- numbers --- */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float from_bf16(uint16_t x) {
    return float_of((uint32_t)x << 16);
}

INLINE uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x), rounded = bits + 0x7FFF + (bits >> 16 & 1);
    return (uint16_t)((x == x ? rounded : 0x7FC00000) >> 16);
}

/* 1.5 * 2^23: added to a float below 2^22 it rounds that to an integer, half to even, which is then
 * in the low bits of the sum. */
#define TO_INTEGER 12582912.0f

/* exp(x) for x <= 0, 0 below -87: bn_exp (vectors.h), whose fused operations round twice here. The
 * error is below 2e-7 of the result. */
INLINE float exp_of(float x) {
    const float shifted = x * BN_LOG2E + TO_INTEGER, n = shifted - TO_INTEGER;
    const float r = x - n * BN_LN2_HI - n * BN_LN2_LO;
    float y = BN_EXP_C6;
    y = y * r + BN_EXP_C5;
    y = y * r + BN_EXP_C4;
    y = y * r + BN_EXP_C3;
    y = y * r + BN_EXP_C2;
    y = y * r * r + r + 1;
    y *= float_of((bits_of(shifted) << 23) + 0x3F800000);
    return x < -87 ? 0 : y;
}

/* --- sums over a row, of 16 independent lanes --- */

/* sum(x²) */
INLINE float squares_of(const float *x, size_t n) {
    float lane[BN_LANES] = {0};
    size_t i = 0;
    for (; i + BN_LANES <= n; i += BN_LANES)
        for (size_t j = 0; j < BN_LANES; j++)
            lane[j] += x[i + j] * x[i + j];
    for (size_t j = 0; i + j < n; j++)
        lane[j] += x[i + j] * x[i + j];
    return tree(lane);
}

/* sum(a b c) */
INLINE float products_of(const float *a, const float *b, const float *c, size_t n) {
    float lane[BN_LANES] = {0};
    size_t i = 0;
    for (; i + BN_LANES <= n; i += BN_LANES)
        for (size_t j = 0; j < BN_LANES; j++)
            lane[j] += a[i + j] * b[i + j] * c[i + j];
    for (size_t j = 0; i + j < n; j++)
        lane[j] += a[i + j] * b[i + j] * c[i + j];
    return tree(lane);
}

/* The bits of floats as integers in the order of the floats; its own inverse. */
INLINE int32_t in_order(uint32_t bits) {
    const int32_t i = (int32_t)bits;
    return i < 0 ? i ^ 0x7FFFFFFF : i;
}

/* The largest x, n >= 1: of integers, because compilers do not vectorize comparisons of floats. */
INLINE float largest_of(const float *x, size_t n) {
    int32_t lane[BN_LANES], most;
    size_t i = 0;
    for (size_t j = 0; j < BN_LANES; j++)
        lane[j] = INT32_MIN;
    for (; i + BN_LANES <= n; i += BN_LANES)
        for (size_t j = 0; j < BN_LANES; j++) {
            const int32_t at = in_order(bits_of(x[i + j]));
            lane[j] = at > lane[j] ? at : lane[j];
        }
    for (size_t j = 0; i + j < n; j++) {
        const int32_t at = in_order(bits_of(x[i + j]));
        lane[j] = at > lane[j] ? at : lane[j];
    }
    most = lane[0];
    for (size_t j = 1; j < BN_LANES; j++)
        most = lane[j] > most ? lane[j] : most;
    return float_of((uint32_t)in_order((uint32_t)most));
}

/* The largest |x|, at least 1e-5; NaN if any is. */
INLINE float magnitude_of(const float *x, size_t n) {
    uint32_t lane[BN_LANES], most;
    size_t i = 0;
    for (size_t j = 0; j < BN_LANES; j++)
        lane[j] = bits_of(1e-5f);
    for (; i + BN_LANES <= n; i += BN_LANES)
        for (size_t j = 0; j < BN_LANES; j++) {
            const uint32_t bits = bits_of(x[i + j]) & 0x7FFFFFFF;
            lane[j] = bits > lane[j] ? bits : lane[j];
        }
    for (size_t j = 0; i + j < n; j++) {
        const uint32_t bits = bits_of(x[i + j]) & 0x7FFFFFFF;
        lane[j] = bits > lane[j] ? bits : lane[j];
    }
    most = lane[0];
    for (size_t j = 1; j < BN_LANES; j++)
        most = lane[j] > most ? lane[j] : most;
    return float_of(most);
}

/* x = exp(x - most); returns their sum. */
INLINE float exponentials(float *x, float most, size_t n) {
    float lane[BN_LANES] = {0};
    size_t i = 0;
    for (size_t k = 0; k < n; k++)
        x[k] = exp_of(x[k] - most);
    for (; i + BN_LANES <= n; i += BN_LANES)
        for (size_t j = 0; j < BN_LANES; j++)
            lane[j] += x[i + j];
    for (size_t j = 0; i + j < n; j++)
        lane[j] += x[i + j];
    return tree(lane);
}

#endif
