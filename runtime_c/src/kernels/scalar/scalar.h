/* SPDX-License-Identifier: MIT
 *
 * scalar.h: shared by the scalar kernels, the specification of every kernel in plain C, one file
 * per topic. SIMD tiers must give the same bits; runtime_c/tests/check_kernels.c verifies this.
 */
#ifndef BITNET_KERNELS_SCALAR_H
#define BITNET_KERNELS_SCALAR_H

#include "../kernels.h"

#include <math.h>
#include <string.h>

extern const bn_product_kernels bn_scalar_products;
extern const bn_vector_kernels bn_scalar_vectors;
extern const bn_attention_kernels bn_scalar_attention[BN_KV_TYPES];
extern const bn_byte_kernels bn_scalar_bytes;
extern const bn_training_kernels bn_scalar_training;

/* --- the float rule --- */

static inline float tree(const float lane[BN_LANES]) {
    float s[BN_LANES];
    memcpy(s, lane, sizeof s);
    for (int half = BN_LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            s[j] += s[j + half];
    return s[0];
}

static inline float dot_f32(const float *w, const float *x, size_t n) {
    float lane[BN_LANES] = {0};
    for (size_t k = 0; k < n; k += BN_LANES)
        for (size_t j = 0; j < BN_LANES; j++)
            lane[j] = k + j < n ? fmaf(w[k + j], x[k + j], lane[j]) : fmaf(0, 0, lane[j]);
    return tree(lane);
}

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = h >> 10 & 31u, mantissa = h & 0x3FFu;
    uint32_t bits;
    float f;
    if (exponent == 31) { /* infinity, NaN (quieted, as the hardware does) */
        bits = sign | 0x7F800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u);
    } else if (exponent == 0) { /* zero, subnormal: mantissa * 2^-24 is exact */
        f = (float)mantissa * 5.9604644775390625e-8f;
        memcpy(&bits, &f, sizeof bits);
        bits |= sign;
    } else {
        bits = sign | (exponent + 112u) << 23 | mantissa << 13;
    }
    memcpy(&f, &bits, sizeof f);
    return f;
}

#endif
