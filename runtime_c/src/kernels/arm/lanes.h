/* SPDX-License-Identifier: MIT
 *
 * lanes.h: the 16 lanes of the float rule (kernels.h) as four registers. Loads of fewer than 16
 * elements pad with zeros, and stores write only the n elements that exist, so loops advance by 16
 * and need no tail.
 */
#ifndef BITNET_ARM_LANES_H
#define BITNET_ARM_LANES_H

#include "arm.h"

typedef float32x4x4_t lanes; /* lane 4i + j is val[i][j] */

INLINE lanes load_all(const float *x) {
    return (lanes){{vld1q_f32(x), vld1q_f32(x + 4), vld1q_f32(x + 8), vld1q_f32(x + 12)}};
}

INLINE void store_all(float *y, lanes v) {
    UNROLL
    for (int i = 0; i < 4; i++)
        vst1q_f32(y + 4 * i, v.val[i]);
}

INLINE lanes load(const float *x, size_t n) {
    if (n >= BN_LANES)
        return load_all(x);
    float buffer[BN_LANES] = {0};
    memcpy(buffer, x, n * sizeof *x);
    return load_all(buffer);
}

INLINE void store(float *y, lanes v, size_t n) {
    if (n >= BN_LANES) {
        store_all(y, v);
        return;
    }
    float buffer[BN_LANES];
    store_all(buffer, v);
    memcpy(y, buffer, n * sizeof *y);
}

INLINE lanes widen(const uint16_t *x) {
    const float16x8_t a = vreinterpretq_f16_u16(vld1q_u16(x));
    const float16x8_t b = vreinterpretq_f16_u16(vld1q_u16(x + 8));
    return (lanes){{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a),
                    vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
}

INLINE lanes load_half(const uint16_t *x, size_t n) {
    if (n >= BN_LANES)
        return widen(x);
    uint16_t buffer[BN_LANES] = {0};
    memcpy(buffer, x, n * sizeof *x);
    return widen(buffer);
}

INLINE lanes load_int8(const int8_t *x, size_t n) {
    int8_t buffer[BN_LANES] = {0};
    if (n < BN_LANES)
        x = memcpy(buffer, x, n);
    const int8x16_t v = vld1q_s8(x);
    const int16x8_t a = vmovl_s8(vget_low_s8(v)), b = vmovl_high_s8(v);
    return (lanes){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), vcvtq_f32_s32(vmovl_high_s16(a)),
                    vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))), vcvtq_f32_s32(vmovl_high_s16(b))}};
}

/* Loads from element i on of an array of f32, f16 or int8, chosen by their size (a constant). */
INLINE lanes load_as(const void *x, size_t i, size_t n, size_t size) {
    return size == 4   ? load((const float *)x + i, n)
           : size == 2 ? load_half((const uint16_t *)x + i, n)
                       : load_int8((const int8_t *)x + i, n);
}

INLINE lanes zero(void) {
    const float32x4_t z = vdupq_n_f32(0);
    return (lanes){{z, z, z, z}};
}

INLINE lanes add_lanes(lanes sum, lanes a) {
    UNROLL
    for (int i = 0; i < 4; i++)
        sum.val[i] = vaddq_f32(sum.val[i], a.val[i]);
    return sum;
}

INLINE lanes fma_lanes(lanes sum, lanes a, lanes b) {
    UNROLL
    for (int i = 0; i < 4; i++)
        sum.val[i] = vfmaq_f32(sum.val[i], a.val[i], b.val[i]);
    return sum;
}

/* See groups.h. */
INLINE void add_group(float *y, const int32_t *acc, const int32_t *q_sums, size_t q_sums_stride,
                      const uint16_t *scales, size_t tokens) {
    const lanes scale = widen(scales);
    for (; tokens > 0; tokens--, y += BN_PANEL, acc += BN_PANEL, q_sums += q_sums_stride) {
        const int32x4_t sum = vdupq_n_s32(*q_sums);
        lanes d;
        UNROLL
        for (int i = 0; i < 4; i++)
            d.val[i] = vcvtq_f32_s32(vsubq_s32(vld1q_s32(acc + 4 * i), sum));
        store_all(y, fma_lanes(load_all(y), d, scale));
    }
}

INLINE float tree(lanes s) {
    const float32x4_t s4 = vaddq_f32(vaddq_f32(s.val[0], s.val[2]), vaddq_f32(s.val[1], s.val[3]));
    const float32x2_t s2 = vadd_f32(vget_low_f32(s4), vget_high_f32(s4));
    return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}

#endif
