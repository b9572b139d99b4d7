/* SPDX-License-Identifier: MIT
 *
 * i8mm.c: products with many tokens by the int8 matrix multiply of Armv8.6: 2 rows × 8 columns
 * times 8 columns × 2 tokens, twice the work of a dot product. A single token, and int8 rows with
 * fewer than 4 tokens, for which pairing would not pay, use the dot product.
 */
#include "../kernels.h"

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)

#include "../groups.h"
#include "gemm.h"
#include "gemv.h"
#include "lanes.h"
#include "rows.h"
#include "trits.h"

INLINE int8x16_t zip1(int8x16_t a, int8x16_t b) { /* words: gives pairs of rows, 8 columns each */
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

INLINE int8x16_t zip2(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

static void put(int8_t *block, int g, int8x16_t a, int8x16_t b) {
    vst1q_s8(block + 32 * g, zip1(a, b));
    vst1q_s8(block + 32 * g + 16, zip2(a, b));
}

/* Pairs 16 columns of a and b, two rows or tokens: columns 0..7 of both, then 8..15. */
INLINE void pair_up(int8x16_t pair[2], const int8_t *a, const int8_t *b) {
    const int64x2_t x = vreinterpretq_s64_s8(vld1q_s8(a)), y = vreinterpretq_s64_s8(vld1q_s8(b));
    pair[0] = vreinterpretq_s8_s64(vzip1q_s64(x, y));
    pair[1] = vreinterpretq_s8_s64(vzip2q_s64(x, y));
}

/* 16 rows × 2·`pairs` tokens, `pairs` a constant of 1 or 2. A register of sums is 2 rows × 2
 * tokens; zipping two tokens' rows of acc gives two of them, unzipping gives the rows back. */
INLINE void multiply_pairs(int32_t *acc, size_t acc_stride, const int8_t *w, size_t steps,
                           const int8_t *q, size_t q_stride, const size_t pairs) {
    int32x4_t sum[2][8]; /* [pair of tokens][pair of rows] */
    UNROLL
    for (size_t p = 0; p < pairs; p++) {
        UNROLL
        for (int g = 0; g < 4; g++) {
            const int32x4_t a = vld1q_s32(acc + 2 * p * acc_stride + 4 * g);
            const int32x4_t b = vld1q_s32(acc + (2 * p + 1) * acc_stride + 4 * g);
            sum[p][2 * g] = vzip1q_s32(a, b);
            sum[p][2 * g + 1] = vzip2q_s32(a, b);
        }
    }
    for (size_t s = 0; s < steps; s++, w += 2 * BLOCK, q += 16) {
        int8x16_t x[2][2];
        UNROLL
        for (size_t p = 0; p < pairs; p++)
            pair_up(x[p], q + 2 * p * q_stride, q + (2 * p + 1) * q_stride);
        UNROLL
        for (int r = 0; r < 8; r++) {
            const int8x16_t w0 = vld1q_s8(w + 16 * r), w1 = vld1q_s8(w + BLOCK + 16 * r);
            UNROLL
            for (size_t p = 0; p < pairs; p++) {
                sum[p][r] = vmmlaq_s32(sum[p][r], w0, x[p][0]);
                sum[p][r] = vmmlaq_s32(sum[p][r], w1, x[p][1]);
            }
        }
    }
    UNROLL
    for (size_t p = 0; p < pairs; p++) {
        UNROLL
        for (int g = 0; g < 4; g++) {
            const int32x4_t a = sum[p][2 * g], b = sum[p][2 * g + 1];
            vst1q_s32(acc + 2 * p * acc_stride + 4 * g, vuzp1q_s32(a, b));
            vst1q_s32(acc + (2 * p + 1) * acc_stride + 4 * g, vuzp2q_s32(a, b));
        }
    }
}

static void multiply(const bn_matmul *m, size_t panel, const int8_t *w, size_t k, size_t steps) {
    for (size_t t = 0; t < m->tokens; t += 4) {
        int32_t *acc = m->acc + t * m->acc_stride + panel * BN_PANEL;
        const int8_t *q = m->q + t * m->q_stride + k;
        const size_t left = m->tokens - t;
        if (left >= 4) {
            multiply_pairs(acc, m->acc_stride, w, steps, q, m->q_stride, 2);
            continue;
        }
        if (left >= 2)
            multiply_pairs(acc, m->acc_stride, w, steps, q, m->q_stride, 1);
        if (left % 2 != 0) { /* the last token as both of a pair, written to the same place */
            acc += (left - 1) * m->acc_stride;
            multiply_pairs(acc, 0, w, steps, q + (left - 1) * m->q_stride, 0, 1);
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

/* Copies a stretch of 16 rows into w, in L1, in the layout of put. */
static void put_rows(int8_t *w, const int8_t *codes, size_t row_bytes, size_t steps) {
    for (size_t r = 0; r < BN_PANEL; r += 2, codes += 2 * row_bytes)
        for (size_t s = 0; s < steps; s++) {
            int8x16_t pair[2];
            pair_up(pair, codes + 16 * s, codes + row_bytes + 16 * s);
            vst1q_s8(w + 2 * s * BLOCK + 8 * r, pair[0]);
            vst1q_s8(w + 2 * s * BLOCK + BLOCK + 8 * r, pair[1]);
        }
}

static void rows_by_dot(const bn_int8_rows *m) {
    rows_all(m, dot_fours);
}

static void rows_by_panel(const bn_int8_rows *m) {
    int8_t w[STRETCH * BN_PANEL] __attribute__((aligned(64)));
    const bn_matmul panels = {.acc = m->acc,
                              .acc_stride = m->acc_stride,
                              .panels = m->rows / BN_PANEL,
                              .q = m->q,
                              .q_stride = m->q_stride,
                              .tokens = m->tokens};
    bn_int8_rows rest = *m;
    clear(&panels);
    for (size_t p = 0; p < panels.panels; p++, rest.codes += BN_PANEL * m->row_bytes)
        for (size_t k = 0; k < m->row_bytes; k += STRETCH) {
            const size_t left = m->row_bytes - k, steps = (left < STRETCH ? left : STRETCH) / 16;
            put_rows(w, rest.codes + k, m->row_bytes, steps);
            multiply(&panels, p, w, k, steps);
        }
    rest.acc += panels.panels * BN_PANEL;
    rest.rows -= panels.panels * BN_PANEL;
    rows_by_dot(&rest);
}

static void int8_rows(const bn_int8_rows *m) {
    if (m->tokens < 4)
        rows_by_dot(m);
    else
        rows_by_panel(m);
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
            sum[i] = vmmlaq_s32(sum[i], w, x);
    }
    UNROLL
    for (int i = 1; i < 16; i++)
        sum[0] = vaddq_s32(sum[0], sum[i]);
    *sink = vaddvq_s32(sum[0]);
    return rounds * 16 * 32;
}

int bn_kernels_i8mm(bn_kernels *table) {
    table->products.ternary_matmul = ternary_matmul;
    table->products.ternary_scaled = ternary_scaled;
    table->products.sketch_matmul = ternary_matmul;
    table->products.trit_matmul = trit_matmul;
    table->products.ternary_grouped = ternary_grouped;
    table->products.int8_rows = int8_rows;
    table->products.int8_peak = int8_peak;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_i8mm)
#endif
