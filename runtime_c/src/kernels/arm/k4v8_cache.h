/* SPDX-License-Identifier: MIT
 *
 * k4v8_cache.h: scores of int8 queries with 4-bit keys, using a tier's dot product of signed bytes.
 */
#ifndef BITNET_ARM_K4V8_CACHE_H
#define BITNET_ARM_K4V8_CACHE_H

#include "arm.h"

enum { K4_WORD = BN_LANES * 4, K4_GROUP_WORDS = BN_NIBBLE_GROUP / 8 };

/* score += the products of a group of up to 4 words with 4 keys, times the scale of each key. */
INLINE float32x4_t qk_k4_group(float32x4_t score, const int8_t *q, const uint8_t *k, size_t words,
                               uint32x4_t scale, dot_fn *dot) {
    const uint8x16_t field = vdupq_n_u8(30); /* twice a code */
    const int8x16_t middle = vdupq_n_s8(15);
    int32x4_t sum = vdupq_n_s32(0);
    for (size_t w = 0; w < words; w++) {
        const uint8x16_t both = vld1q_u8(k + w * K4_WORD);
        const int8x16_t a = vreinterpretq_s8_u8(vandq_u8(vshlq_n_u8(both, 1), field));
        const int8x16_t b = vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(both, 3), field));
        sum = dot(sum, vsubq_s8(a, middle), four_of(q + 8 * w));
        sum = dot(sum, vsubq_s8(b, middle), four_of(q + 8 * w + 4));
    }
    return vfmaq_f32(score, vcvtq_f32_s32(sum), vreinterpretq_f32_u32(scale));
}

/* Scores of one query with four keys. */
INLINE void qk_k4_keys(float *scores, const int8_t *q, float q_scale, const uint8_t *k,
                       size_t head_dim, dot_fn *dot) {
    float32x4_t score = vdupq_n_f32(0);
    for (size_t left = (head_dim + 7) / 8; left > 0; q += 2 * BN_NIBBLE_GROUP) {
        const size_t words = left < 2 * K4_GROUP_WORDS ? left : 2 * K4_GROUP_WORDS;
        const size_t first = words < K4_GROUP_WORDS ? words : K4_GROUP_WORDS;
        const uint32x4_t scales = vreinterpretq_u32_u8(vld1q_u8(k + words * K4_WORD));
        score = qk_k4_group(score, q, k, first, vshlq_n_u32(scales, 16), dot);
        score = qk_k4_group(score, q + BN_NIBBLE_GROUP, k + K4_GROUP_WORDS * K4_WORD, words - first,
                            vandq_u32(scales, vdupq_n_u32(0xffff0000u)), dot);
        k += (words + 1) * K4_WORD;
        left -= words;
    }
    vst1q_f32(scores, vmulq_n_f32(score, q_scale));
}

INLINE void qk_k4_all(const bn_qk *all, dot_fn *dot) {
    const bn_qk a = *all;
    const size_t E = a.head_dim, q_row = bn_q_row(E), words = bn_nibble_words(E);
    for (size_t t = 0; t < a.tiles; t++)
        for (size_t i = 0; i < a.n_q; i++)
            for (size_t key = 0; key < BN_LANES; key += 4)
                qk_k4_keys(a.scores + i * a.score_stride + t * BN_LANES + key, a.codes + i * q_row,
                           a.q_scale[i], (const uint8_t *)a.k + t * words * K4_WORD + 4 * key, E,
                           dot);
}

#endif
