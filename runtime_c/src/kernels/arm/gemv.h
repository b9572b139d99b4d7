/* SPDX-License-Identifier: MIT
 *
 * gemv.h: products with one token, for the tiers with the dot-product instruction. They are limited
 * by memory, so a weight takes only one mask between its load and the multiplication.
 */
#ifndef BITNET_ARM_GEMV_H
#define BITNET_ARM_GEMV_H

#include "arm.h"

/* Adds four products of bytes to each 32-bit lane. */
INLINE int32x4_t dot_fours(int32x4_t sum, int8x16_t a, int8x16_t b) {
    return vdotq_s32(sum, a, b);
}

/* Fields 1 and 2 are masked in place and so are scaled by 4 and 16; each has its own sums, and the
 * shifts at the end are exact. Field 3 includes the sign bit, so it is shifted down. */
INLINE void ternary_panel(int32_t *acc, const uint8_t *tile, size_t k_tiles, const int8_t *q) {
    const uint8x16_t m0 = vdupq_n_u8(0x03), m1 = vdupq_n_u8(0x0c), m2 = vdupq_n_u8(0x30);
    int32x4_t sum[4], by4[4], by16[4];
    UNROLL
    for (int g = 0; g < 4; g++)
        sum[g] = by4[g] = by16[g] = vdupq_n_s32(0);
    for (size_t i = 0; i < k_tiles; i++, tile += BN_TILE_BYTES, q += BN_TERNARY_TILE_K) {
        const int8x16_t x = vld1q_s8(q);
        UNROLL
        for (int g = 0; g < 4; g++) {
            const uint8x16_t v = vld1q_u8(tile + 16 * g);
            const int8x16_t f0 = vreinterpretq_s8_u8(vandq_u8(v, m0));
            const int8x16_t f1 = vreinterpretq_s8_u8(vandq_u8(v, m1));
            const int8x16_t f2 = vreinterpretq_s8_u8(vandq_u8(v, m2));
            const int8x16_t f3 = vreinterpretq_s8_u8(vshrq_n_u8(v, 6));
            sum[g] = vdotq_laneq_s32(sum[g], f0, x, 0);
            by4[g] = vdotq_laneq_s32(by4[g], f1, x, 1);
            by16[g] = vdotq_laneq_s32(by16[g], f2, x, 2);
            sum[g] = vdotq_laneq_s32(sum[g], f3, x, 3);
        }
    }
    UNROLL
    for (int g = 0; g < 4; g++)
        vst1q_s32(acc + 4 * g, vsraq_n_s32(vsraq_n_s32(sum[g], by4[g], 2), by16[g], 4));
}

/* Five trits per byte, without decoding: byte v is multiplied by the activations of its first
 * column, 3v by those of the second, and so on. 256 times a code is 3v minus the next v (FORMAT.md
 * §4); with v - 128 instead of v this gives code - 1, so q_sum, Σq, is added. */
INLINE void trit_panel(int32_t *acc, const uint8_t *tile, size_t k_tiles, const int8_t *q,
                       int32_t q_sum) {
    const int8x16_t three = vdupq_n_s8(3);
    int32x4_t a[4], b[4];
    UNROLL
    for (int g = 0; g < 4; g++)
        a[g] = b[g] = vdupq_n_s32(0);
    for (size_t i = 0; i < k_tiles; i++, tile += BN_TILE_BYTES, q += BN_TRIT_TILE_K) {
        int32_t last;
        memcpy(&last, q + 16, sizeof last);
        const int8x16_t x = vld1q_s8(q), x4 = vreinterpretq_s8_s32(vdupq_n_s32(last));
        UNROLL
        for (int g = 0; g < 4; g++) {
            const uint8x16_t byte = vld1q_u8(tile + 16 * g);
            const int8x16_t v0 = vreinterpretq_s8_u8(veorq_u8(byte, vdupq_n_u8(0x80)));
            const int8x16_t v1 = vmulq_s8(v0, three), v2 = vmulq_s8(v1, three);
            const int8x16_t v3 = vmulq_s8(v2, three), v4 = vmulq_s8(v3, three);
            a[g] = vdotq_laneq_s32(a[g], v0, x, 0);
            b[g] = vdotq_laneq_s32(b[g], v1, x, 0);
            a[g] = vdotq_laneq_s32(a[g], v1, x, 1);
            b[g] = vdotq_laneq_s32(b[g], v2, x, 1);
            a[g] = vdotq_laneq_s32(a[g], v2, x, 2);
            b[g] = vdotq_laneq_s32(b[g], v3, x, 2);
            a[g] = vdotq_laneq_s32(a[g], v3, x, 3);
            b[g] = vdotq_laneq_s32(b[g], v4, x, 3);
            a[g] = vdotq_s32(a[g], v4, x4);
            b[g] = vdotq_s32(b[g], vmulq_s8(v4, three), x4);
        }
    }
    UNROLL
    for (int g = 0; g < 4; g++)
        vst1q_s32(acc + 4 * g,
                  vsraq_n_s32(vdupq_n_s32(q_sum), vsubq_s32(vmulq_n_s32(a[g], 3), b[g]), 8));
}

static inline void ternary_gemv(const bn_matmul *m) {
    for (size_t p = 0; p < m->panels; p++)
        ternary_panel(m->acc + p * BN_PANEL, m->tiles + p * m->panel_stride, m->k_tiles, m->q);
}

static inline void trit_gemv(const bn_matmul *m) {
    int32_t q_sum = 0;
    for (size_t k = 0; k < m->k_tiles * BN_TRIT_TILE_K; k++)
        q_sum += m->q[k];
    for (size_t p = 0; p < m->panels; p++)
        trit_panel(m->acc + p * BN_PANEL, m->tiles + p * m->panel_stride, m->k_tiles, m->q, q_sum);
}

#endif
