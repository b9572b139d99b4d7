/* SPDX-License-Identifier: MIT
 *
 * neon_attention.c: attention scores and weighted sums of values for all ARM tiers; tiers with a
 * dot product have their own kernels for quantized caches.
 */
#include "../kernels.h"

#if defined(__aarch64__)

#include "lanes.h"

/* Q queries and T tiles of keys, each of which is four registers. */
INLINE void qk_tiles(float *scores, size_t score_stride, const float *q, const uint8_t *k,
                     size_t head_dim, size_t size, const size_t Q, const size_t T) {
    const size_t tile = head_dim * BN_LANES * size;
    lanes sum[4];
    UNROLL
    for (size_t i = 0; i < Q * T; i++)
        sum[i] = zero();
    for (size_t d = 0; d < head_dim; d++) {
        UNROLL
        for (size_t t = 0; t < T; t++) {
            const lanes key = load_as(k + t * tile, d * BN_LANES, BN_LANES, size);
            UNROLL
            for (size_t i = 0; i < Q; i++) {
                const float32x4_t x = vdupq_n_f32(q[i * head_dim + d]);
                sum[t * Q + i] = fma_lanes(sum[t * Q + i], key, (lanes){{x, x, x, x}});
            }
        }
    }
    UNROLL
    for (size_t t = 0; t < T; t++) {
        UNROLL
        for (size_t i = 0; i < Q; i++)
            store_all(scores + i * score_stride + t * BN_LANES, sum[t * Q + i]);
    }
}

INLINE void qk(const bn_qk *all, size_t size) {
    const bn_qk a = *all;
    const size_t E = a.head_dim, stride = a.score_stride, tile = E * BN_LANES * size;
    const uint8_t *k = a.k;
    size_t t = 0;
    for (; a.n_q == 1 && t + 4 <= a.tiles; t += 4)
        qk_tiles(a.scores + t * BN_LANES, stride, a.q, k + t * tile, E, size, 1, 4);
    for (; t < a.tiles; t++) {
        size_t i = 0;
        for (; i + 4 <= a.n_q; i += 4)
            qk_tiles(a.scores + i * stride + t * BN_LANES, stride, a.q + i * E, k + t * tile, E,
                     size, 4, 1);
        for (; i < a.n_q; i++)
            qk_tiles(a.scores + i * stride + t * BN_LANES, stride, a.q + i * E, k + t * tile, E,
                     size, 1, 1);
    }
}

static void qk_f16(const bn_qk *a) {
    qk(a, sizeof(uint16_t));
}

static void qk_f32(const bn_qk *a) {
    qk(a, sizeof(float));
}

/* 16 dimensions of `n_q` (a constant) queries stay in registers during the loop over the keys. */
INLINE void pv_queries(float *out, const float *p, size_t p_stride, const void *v, size_t d,
                       size_t head_dim, size_t keys, size_t size, const size_t n_q) {
    lanes sum[4];
    UNROLL
    for (size_t i = 0; i < n_q; i++)
        sum[i] = load(out + i * head_dim + d, head_dim - d);
    for (size_t t = 0; t < keys; t++) {
        const lanes value = load_as(v, t * head_dim + d, head_dim - d, size);
        UNROLL
        for (size_t i = 0; i < n_q; i++) {
            const float32x4_t weight = vdupq_n_f32(p[i * p_stride + t]);
            sum[i] = fma_lanes(sum[i], (lanes){{weight, weight, weight, weight}}, value);
        }
    }
    UNROLL
    for (size_t i = 0; i < n_q; i++)
        store(out + i * head_dim + d, sum[i], head_dim - d);
}

INLINE void pv(const bn_pv *all, size_t size) {
    const bn_pv a = *all; /* local copy: stores cannot alias it */
    const size_t E = a.head_dim, stride = a.p_stride;
    size_t i = 0;
    for (; i + 4 <= a.n_q; i += 4)
        for (size_t d = 0; d < E; d += BN_LANES)
            pv_queries(a.out + i * E, a.p + i * stride, stride, a.v, d, E, a.keys, size, 4);
    for (; i < a.n_q; i++)
        for (size_t d = 0; d < E; d += BN_LANES)
            pv_queries(a.out + i * E, a.p + i * stride, stride, a.v, d, E, a.keys, size, 1);
}

static void pv_f16(const bn_pv *a) {
    pv(a, sizeof(uint16_t));
}

static void pv_f32(const bn_pv *a) {
    pv(a, sizeof(float));
}

/* Codes of query i's weights from key t on: upper parts; the lower 7 bits are BN_LANES bytes
 * later. */
INLINE const uint8_t *weights_of(const bn_pv *a, size_t i, size_t t) {
    return a->codes + i * a->p_stride + t / BN_LANES * 2 * BN_LANES + t % BN_LANES;
}

/* n <= 8 dimensions of a query; a product with one key fits 16 bits. */
INLINE void pv_int8_part(const bn_pv *a, size_t i, size_t d, size_t n) {
    const size_t E = a->head_dim;
    const int8_t *v = (const int8_t *)a->v + BN_VALUE_GROUP * d;
    int32_t sum[8] = {0};
    int32x4_t high[4], low[4];
    UNROLL
    for (int g = 0; g < 4; g++)
        high[g] = low[g] = vdupq_n_s32(0);
    for (size_t t = 0; t < a->keys; t += BN_VALUE_GROUP, v += BN_VALUE_GROUP * E) {
        const int8x16_t h = four_of((const int8_t *)weights_of(a, i, t));
        const int8x16_t l = four_of((const int8_t *)weights_of(a, i, t) + BN_LANES);
        int8_t end[32] = {0};
        const int8_t *from = n < 8 ? memcpy(end, v, BN_VALUE_GROUP * n) : v;
        UNROLL
        for (int g = 0; g < 2; g++) {
            const int8x16_t x = vld1q_s8(from + 16 * g);
            high[2 * g] = vpadalq_s16(high[2 * g], vmull_s8(vget_low_s8(x), vget_low_s8(h)));
            high[2 * g + 1] = vpadalq_s16(high[2 * g + 1], vmull_high_s8(x, h));
            low[2 * g] = vpadalq_s16(low[2 * g], vmull_s8(vget_low_s8(x), vget_low_s8(l)));
            low[2 * g + 1] = vpadalq_s16(low[2 * g + 1], vmull_high_s8(x, l));
        }
    }
    UNROLL
    for (int g = 0; g < 2; g++) {
        const int32x4_t h = vpaddq_s32(high[2 * g], high[2 * g + 1]);
        const int32x4_t l = vpaddq_s32(low[2 * g], low[2 * g + 1]);
        vst1q_s32(sum + 4 * g, vaddq_s32(vshlq_n_s32(h, BN_WEIGHT_LOW), l));
    }
    for (size_t j = 0; j < n; j++)
        a->sums[i * E + d + j] += sum[j];
}

static void pv_int8(const bn_pv *all) {
    const bn_pv a = *all;
    for (size_t i = 0; i < a.n_q; i++)
        for (size_t d = 0; d < a.head_dim; d += 8)
            pv_int8_part(&a, i, d, a.head_dim - d < 8 ? a.head_dim - d : 8);
}

static float weigh(uint8_t *codes, float *w, const float *scale, size_t low, size_t high,
                   size_t n) {
    float32x4_t most = vdupq_n_f32(BN_WEIGHT_LEAST);
    float largest = BN_WEIGHT_LEAST;
    size_t t = low;
    for (; t + 4 <= high; t += 4) {
        const float32x4_t x = vmulq_f32(vld1q_f32(w + t), vld1q_f32(scale + t));
        vst1q_f32(w + t, x);
        most = vmaxq_f32(most, x); /* NaN wins */
    }
    largest = vmaxvq_f32(most);
    for (; t < high; t++) {
        w[t] *= scale[t];
        largest = w[t] > largest || w[t] != w[t] ? w[t] : largest;
    }
    const float32x4_t s = vdupq_n_f32(BN_WEIGHT_MOST / largest), zero = vdupq_n_f32(0);
    memset(w, 0, low * sizeof *w);
    memset(w + high, 0, (n - high) * sizeof *w);
    for (t = 0; t < n; t += BN_LANES) {
        uint16x8_t code[2]; /* NaN becomes 0 */
        UNROLL
        for (size_t j = 0; j < 2; j++) {
            const float32x4_t a = vmaxnmq_f32(vmulq_f32(vld1q_f32(w + t + 8 * j), s), zero);
            const float32x4_t b = vmaxnmq_f32(vmulq_f32(vld1q_f32(w + t + 8 * j + 4), s), zero);
            code[j] = vcombine_u16(vmovn_u32(vcvtnq_u32_f32(a)), vmovn_u32(vcvtnq_u32_f32(b)));
        }
        UNROLL
        for (size_t j = 0; j < 2; j++) {
            uint8_t *to = codes + 2 * t + 8 * j;
            vst1_u8(to, vshrn_n_u16(code[j], BN_WEIGHT_LOW));
            vst1_u8(to + BN_LANES,
                    vand_u8(vmovn_u16(code[j]), vdup_n_u8((1 << BN_WEIGHT_LOW) - 1)));
        }
    }
    return largest / BN_WEIGHT_MOST;
}

/* Scores of one query with 16 keys. The products of two words are added in 16 bits before widening;
 * if the number of words is odd, the last is paired with zeros of q. */
INLINE void qk_int8_tile(float *scores, const int8_t *q, float q_scale, const int8_t *k,
                         size_t words) {
    const float *k_scale = (const float *)(const void *)(k + words * 64);
    int32x4_t sum[8]; /* [pair of keys] */
    UNROLL
    for (int i = 0; i < 8; i++)
        sum[i] = vdupq_n_s32(0);
    for (size_t w = 0; w < words; w += 2, q += 8) {
        const int8x16_t x0 = four_of(q), x1 = four_of(q + 4);
        const int8_t *k0 = k + w * 64, *k1 = w + 1 < words ? k0 + 64 : k0;
        UNROLL
        for (int g = 0; g < 4; g++) {
            const int8x16_t a = vld1q_s8(k0 + 16 * g), b = vld1q_s8(k1 + 16 * g);
            int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(x0));
            int16x8_t high = vmull_high_s8(a, x0);
            low = vmlal_s8(low, vget_low_s8(b), vget_low_s8(x1));
            high = vmlal_high_s8(high, b, x1);
            sum[2 * g] = vpadalq_s16(sum[2 * g], low);
            sum[2 * g + 1] = vpadalq_s16(sum[2 * g + 1], high);
        }
    }
    UNROLL
    for (int g = 0; g < 4; g++) {
        const int32x4_t total = vpaddq_s32(sum[2 * g], sum[2 * g + 1]);
        vst1q_f32(scores + 4 * g, vmulq_f32(vcvtq_f32_s32(total),
                                            vmulq_n_f32(vld1q_f32(k_scale + 4 * g), q_scale)));
    }
}

static void qk_int8(const bn_qk *all) {
    const bn_qk a = *all;
    const size_t words = (a.head_dim + 3) / 4, q_row = bn_q_row(a.head_dim);
    for (size_t t = 0; t < a.tiles; t++)
        for (size_t i = 0; i < a.n_q; i++)
            qk_int8_tile(a.scores + i * a.score_stride + t * BN_LANES, a.codes + i * q_row,
                         a.q_scale[i], (const int8_t *)a.k + t * (words + 1) * 4 * BN_LANES, words);
}

void bn_kernels_neon_attention(bn_kernels *table) {
    table->attention[BN_KV_F16] = (bn_attention_kernels){qk_f16, pv_f16, NULL};
    table->attention[BN_KV_F32] = (bn_attention_kernels){qk_f32, pv_f32, NULL};
    table->attention[BN_KV_INT8] = (bn_attention_kernels){qk_int8, pv_int8, weigh};
    table->attention[BN_KV_K4V8].pv = pv_int8;
    table->attention[BN_KV_K4V8].weigh = weigh;
}

#endif
