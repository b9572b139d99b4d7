/* SPDX-License-Identifier: MIT
 *
 * dotprod.c: integer products with the dot-product instruction of Armv8.2, which multiplies four
 * broadcast activations by four columns of each of four rows, so that rows stay in their lanes.
 */
#include "../kernels.h"

#if defined(__ARM_FEATURE_DOTPROD)

#include "../groups.h"
#include "gemm.h"
#include "gemv.h"
#include "k4v8_cache.h"
#include "lanes.h"
#include "lines.h"
#include "rows.h"
#include "trits.h"

static void put(int8_t *block, int g, int8x16_t a, int8x16_t b) {
    vst1q_s8(block + 16 * g, a);
    vst1q_s8(block + 64 + 16 * g, b);
}

/* 16 rows × `tokens` (a constant, at most 4) sums stay in registers. */
INLINE void multiply_tokens(int32_t *acc, size_t acc_stride, const int8_t *w, size_t steps,
                            const int8_t *q, size_t q_stride, const size_t tokens) {
    int32x4_t sum[4][4]; /* [token][group of 4 rows] */
    UNROLL
    for (size_t t = 0; t < tokens; t++) {
        UNROLL
        for (int g = 0; g < 4; g++)
            sum[t][g] = vld1q_s32(acc + t * acc_stride + 4 * g);
    }
    for (size_t s = 0; s < steps; s++, w += 2 * BLOCK, q += 16) {
        int8x16_t x[4];
        UNROLL
        for (size_t t = 0; t < tokens; t++)
            x[t] = vld1q_s8(q + t * q_stride);
        UNROLL
        for (int g = 0; g < 4; g++) {
            const int8x16_t w0 = vld1q_s8(w + 16 * g), w1 = vld1q_s8(w + 64 + 16 * g);
            const int8x16_t w2 = vld1q_s8(w + 128 + 16 * g), w3 = vld1q_s8(w + 192 + 16 * g);
            UNROLL
            for (size_t t = 0; t < tokens; t++) {
                sum[t][g] = vdotq_laneq_s32(sum[t][g], w0, x[t], 0);
                sum[t][g] = vdotq_laneq_s32(sum[t][g], w1, x[t], 1);
                sum[t][g] = vdotq_laneq_s32(sum[t][g], w2, x[t], 2);
                sum[t][g] = vdotq_laneq_s32(sum[t][g], w3, x[t], 3);
            }
        }
    }
    UNROLL
    for (size_t t = 0; t < tokens; t++) {
        UNROLL
        for (int g = 0; g < 4; g++)
            vst1q_s32(acc + t * acc_stride + 4 * g, sum[t][g]);
    }
}

static void multiply(const bn_matmul *m, size_t panel, const int8_t *w, size_t k, size_t steps) {
    for (size_t t = 0; t < m->tokens; t += 4) {
        int32_t *acc = m->acc + t * m->acc_stride + panel * BN_PANEL;
        const int8_t *q = m->q + t * m->q_stride + k;
        switch (m->tokens - t) {
        case 1:
            multiply_tokens(acc, m->acc_stride, w, steps, q, m->q_stride, 1);
            break;
        case 2:
            multiply_tokens(acc, m->acc_stride, w, steps, q, m->q_stride, 2);
            break;
        case 3:
            multiply_tokens(acc, m->acc_stride, w, steps, q, m->q_stride, 3);
            break;
        default:
            multiply_tokens(acc, m->acc_stride, w, steps, q, m->q_stride, 4);
        }
    }
}

static void ternary_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        ternary_gemv(m);
    else
        ternary_gemm(m, put, multiply);
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    ternary_matmul(m);
    bn_neon_scale_sums(a);
}

static void ternary_grouped(const bn_grouped *m) {
    grouped_by(m, ternary_matmul, add_group);
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        trit_gemv(m);
    else
        trits_many(m, ternary_matmul);
}

static void int8_rows(const bn_int8_rows *m) {
    rows_all(m, dot_fours);
}

static void ternary_rows(const bn_lines *m) {
    lines_rows(m, dot_fours);
}

static void ternary_columns(const bn_lines *m) {
    lines_columns(m, dot_fours);
}

/* Scores of n_q (a constant, at most 4) queries with a tile of keys: 16 sums stay in registers. */
INLINE void qk_int8_tile(float *scores, size_t score_stride, const int8_t *q, size_t q_row,
                         const float *q_scale, const int8_t *k, size_t words, const size_t n_q) {
    int32x4_t sum[4][4]; /* [query][group of 4 keys] */
    UNROLL
    for (int i = 0; i < 16; i++)
        sum[i / 4][i % 4] = vdupq_n_s32(0);
    for (size_t w = 0; w < words; w++, k += 64) {
        UNROLL
        for (size_t i = 0; i < n_q; i++) {
            const int32_t *word = (const int32_t *)(const void *)(q + i * q_row + 4 * w);
            const int8x16_t x = vreinterpretq_s8_s32(vld1q_dup_s32(word));
            UNROLL
            for (int g = 0; g < 4; g++)
                sum[i][g] = vdotq_s32(sum[i][g], vld1q_s8(k + 16 * g), x);
        }
    }
    UNROLL
    for (size_t i = 0; i < n_q; i++) {
        UNROLL
        for (int g = 0; g < 4; g++) {
            const float32x4_t scale =
                vmulq_n_f32(vld1q_f32((const float *)(const void *)k + 4 * g), q_scale[i]);
            vst1q_f32(scores + i * score_stride + 4 * g,
                      vmulq_f32(vcvtq_f32_s32(sum[i][g]), scale));
        }
    }
}

static void qk_int8(const bn_qk *a) {
    const size_t words = (a->head_dim + 3) / 4, q_row = bn_q_row(a->head_dim);
    const size_t stride = a->score_stride;
    const int8_t *k = a->k, *q = a->codes;
    float *scores = a->scores;
    for (size_t t = 0; t < a->tiles; t++, k += (words + 1) * 64, scores += BN_LANES) {
        size_t i = 0;
        for (; i + 4 <= a->n_q; i += 4)
            qk_int8_tile(scores + i * stride, stride, q + i * q_row, q_row, a->q_scale + i, k,
                         words, 4);
        for (; i < a->n_q; i++)
            qk_int8_tile(scores + i * stride, stride, q + i * q_row, q_row, a->q_scale + i, k,
                         words, 1);
    }
}

/* n <= 4 dimensions of a query. */
INLINE void pv_int8_four(int32_t *out, size_t head_dim, const int8_t *codes, const int8_t *v,
                         size_t keys, size_t n) {
    int32x4_t high = vdupq_n_s32(0), low = high;
    int32_t sum[4];
    for (size_t t = 0; t < keys; t += BN_VALUE_GROUP, v += BN_VALUE_GROUP * head_dim) {
        const int8_t *words = codes + t / BN_LANES * 2 * BN_LANES + t % BN_LANES;
        const int32_t *h = (const int32_t *)(const void *)words;
        int8_t end[16] = {0};
        const int8x16_t x = vld1q_s8(n < 4 ? memcpy(end, v, BN_VALUE_GROUP * n) : v);
        high = vdotq_s32(high, x, vreinterpretq_s8_s32(vld1q_dup_s32(h)));
        low = vdotq_s32(low, x, vreinterpretq_s8_s32(vld1q_dup_s32(h + BN_LANES / 4)));
    }
    vst1q_s32(sum, vaddq_s32(vshlq_n_s32(high, BN_WEIGHT_LOW), low));
    for (size_t j = 0; j < n; j++)
        out[j] += sum[j];
}

/* 16 dimensions of n_q (a constant, at most 3) queries: 24 sums stay in registers. */
INLINE void pv_int8_tile(int32_t *out, size_t head_dim, const int8_t *codes, size_t p_stride,
                         const int8_t *v, size_t keys, const size_t n_q) {
    int32x4_t high[3][4], low[3][4];
    UNROLL
    for (int i = 0; i < 12; i++)
        high[i / 4][i % 4] = low[i / 4][i % 4] = vdupq_n_s32(0);
    for (size_t t = 0; t < keys; t += BN_VALUE_GROUP, v += BN_VALUE_GROUP * head_dim) {
        int8x16_t x[4];
        UNROLL
        for (int g = 0; g < 4; g++)
            x[g] = vld1q_s8(v + 16 * g);
        UNROLL
        for (size_t i = 0; i < n_q; i++) {
            const int8_t *words = codes + i * p_stride + t / BN_LANES * 2 * BN_LANES + t % BN_LANES;
            const int32_t *at = (const int32_t *)(const void *)words;
            const int8x16_t h = vreinterpretq_s8_s32(vld1q_dup_s32(at));
            const int8x16_t l = vreinterpretq_s8_s32(vld1q_dup_s32(at + BN_LANES / 4));
            UNROLL
            for (int g = 0; g < 4; g++) {
                high[i][g] = vdotq_s32(high[i][g], x[g], h);
                low[i][g] = vdotq_s32(low[i][g], x[g], l);
            }
        }
    }
    UNROLL
    for (size_t i = 0; i < n_q; i++) {
        UNROLL
        for (int g = 0; g < 4; g++) {
            int32_t *to = out + i * head_dim + 4 * g;
            const int32x4_t sum = vaddq_s32(vshlq_n_s32(high[i][g], BN_WEIGHT_LOW), low[i][g]);
            vst1q_s32(to, vaddq_s32(vld1q_s32(to), sum));
        }
    }
}

static void pv_int8(const bn_pv *all) {
    const bn_pv a = *all;
    const size_t E = a.head_dim, stride = a.p_stride;
    for (size_t i = 0, block; i < a.n_q; i += block) {
        const int8_t *codes = (const int8_t *)a.codes + i * stride, *v = a.v;
        int32_t *out = a.sums + i * E;
        size_t d = 0;
        block = a.n_q - i >= 3 ? 3 : 1;
        for (; d + 16 <= E; d += 16)
            if (block == 3)
                pv_int8_tile(out + d, E, codes, stride, v + BN_VALUE_GROUP * d, a.keys, 3);
            else
                pv_int8_tile(out + d, E, codes, stride, v + BN_VALUE_GROUP * d, a.keys, 1);
        for (; d < E; d += 4)
            for (size_t j = 0; j < block; j++)
                pv_int8_four(out + j * E + d, E, codes + j * stride, v + BN_VALUE_GROUP * d, a.keys,
                             E - d < 4 ? E - d : 4);
    }
}

static void qk_k4v8(const bn_qk *a) {
    qk_k4_all(a, dot_fours);
}

static uint64_t int8_peak(uint64_t rounds, int32_t *sink) {
    int32x4_t sum[16];
    int8x16_t w = vdupq_n_s8((int8_t)(*sink & 3)), x = vdupq_n_s8((int8_t)(*sink & 63));
    UNROLL
    for (int i = 0; i < 16; i++)
        sum[i] = vdupq_n_s32(i);
    for (uint64_t r = 0; r < rounds; r++) {
        KEEP(w);
        UNROLL
        for (int i = 0; i < 16; i++)
            sum[i] = vdotq_laneq_s32(sum[i], w, x, 0);
    }
    UNROLL
    for (int i = 1; i < 16; i++)
        sum[0] = vaddq_s32(sum[0], sum[i]);
    *sink = vaddvq_s32(sum[0]);
    return rounds * 16 * 16;
}

int bn_kernels_dotprod(bn_kernels *table) {
    table->products.ternary_matmul = ternary_matmul;
    table->products.ternary_scaled = ternary_scaled;
    table->products.sketch_matmul = ternary_matmul;
    table->products.trit_matmul = trit_matmul;
    table->products.ternary_grouped = ternary_grouped;
    table->products.int8_rows = int8_rows;
    table->products.ternary_rows = ternary_rows;
    table->products.ternary_columns = ternary_columns;
    table->attention[BN_KV_INT8].qk = qk_int8;
    table->attention[BN_KV_INT8].pv = pv_int8;
    table->attention[BN_KV_K4V8].qk = qk_k4v8;
    table->attention[BN_KV_K4V8].pv = pv_int8;
    table->products.int8_peak = int8_peak;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_dotprod)
#endif
