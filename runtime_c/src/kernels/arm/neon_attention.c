/* SPDX-License-Identifier: MIT
 *
 * neon_attention.c: scores and weighted values, for all ARM tiers; on int8 keys the tiers
 * with a dot product have their own.
 */
#include "../kernels.h"

#if defined(__aarch64__)

#include "lanes.h"

/* 4 keys: lane j of the float rule is a register, so the sums stay in their lanes. */
INLINE void qk_keys(float *scores, const float *q, const uint8_t *k, size_t head_dim, size_t size) {
    const size_t row = BN_LANES * size;
    uint8_t last[BN_LANES * BN_LANES * sizeof(float)] __attribute__((aligned(16)));
    float32x4_t s[BN_LANES];
    UNROLL
    for (int j = 0; j < BN_LANES; j++)
        s[j] = vdupq_n_f32(0);
    for (size_t d = 0; d < head_dim; d += BN_LANES, k += BN_LANES * row) {
        const lanes x = load(q + d, head_dim - d);
        if (head_dim - d < BN_LANES) {
            memset(last, 0, sizeof last);
            for (size_t j = 0; j < head_dim - d; j++)
                memcpy(last + j * row, k + j * row, 4 * size);
            k = last;
        }
        UNROLL
        for (int j = 0; j < BN_LANES; j++) {
            const void *at = k + (size_t)j * row;
            const float32x4_t key =
                size == 2 ? vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))) : vld1q_f32(at);
            s[j] = vfmaq_n_f32(s[j], key, x.val[j / 4][j % 4]);
        }
    }
    UNROLL
    for (int j = 0; j < 8; j++)
        s[j] = vaddq_f32(s[j], s[j + 8]);
    UNROLL
    for (int j = 0; j < 4; j++)
        s[j] = vaddq_f32(s[j], s[j + 4]);
    vst1q_f32(scores, vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[1], s[3])));
}

INLINE void qk(float *scores, size_t score_stride, const float *q, size_t n_q, const void *k,
               size_t head_dim, size_t tiles, size_t size) {
    for (size_t t = 0; t < tiles; t++)
        for (size_t i = 0; i < n_q; i++)
            for (size_t j = 0; j < BN_LANES; j += 4)
                qk_keys(scores + i * score_stride + t * BN_LANES + j, q + i * head_dim,
                        (const uint8_t *)k + (t * head_dim * BN_LANES + j) * size, head_dim, size);
}

static void qk_f16(const bn_qk *a) {
    enum { WIDE = 128 };
    float tile[WIDE * BN_LANES];
    const uint16_t *k = a->k;
    const size_t E = a->head_dim;
    if (a->n_q == 1 || E > WIDE) {
        qk(a->scores, a->score_stride, a->q, a->n_q, k, E, a->tiles, sizeof *k);
        return;
    }
    for (size_t t = 0; t < a->tiles; t++) { /* widen a tile once for all queries */
        for (size_t i = 0; i < E * BN_LANES; i += BN_LANES)
            store_all(tile + i, widen(k + t * E * BN_LANES + i));
        qk(a->scores + t * BN_LANES, a->score_stride, a->q, a->n_q, tile, E, 1, sizeof *tile);
    }
}

static void qk_f32(const bn_qk *a) {
    qk(a->scores, a->score_stride, a->q, a->n_q, a->k, a->head_dim, a->tiles, sizeof(float));
}

/* 16 dimensions of `n_q` (a constant) queries stay in registers while the keys go by. */
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
    const bn_pv a = *all; /* in registers: no store can change it */
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

static void pv_int8(const bn_pv *a) {
    pv(a, sizeof(int8_t));
}

/* Four dimensions of a query to all keys. */
INLINE int8x16_t word(const int8_t *q) {
    int8x16_t x = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(const void *)q));
    KEEP(x); /* see BROADCAST in neon.c */
    return x;
}

/* 16 keys and one query. Two words go into 16 bits before they are added up; an odd last one is
 * completed by q, which is zero there. */
INLINE void qk_int8_tile(float *scores, const int8_t *q, float q_scale, const int8_t *k,
                         const float *k_scale, size_t words) {
    int32x4_t sum[8]; /* [pair of keys] */
    UNROLL
    for (int i = 0; i < 8; i++)
        sum[i] = vdupq_n_s32(0);
    for (size_t w = 0; w < words; w += 2, q += 8) {
        const int8x16_t x0 = word(q), x1 = word(q + 4);
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
                         a.q_scale[i], (const int8_t *)a.k + t * words * 4 * BN_LANES,
                         a.k_scale + t * BN_LANES, words);
}

void bn_kernels_neon_attention(bn_kernels *table) {
    table->attention[BN_KV_F16] = (bn_attention_kernels){qk_f16, pv_f16};
    table->attention[BN_KV_F32] = (bn_attention_kernels){qk_f32, pv_f32};
    table->attention[BN_KV_INT8] = (bn_attention_kernels){qk_int8, pv_int8};
}

#endif
