/* SPDX-License-Identifier: MIT
 *
 * neon.c: integer products with the multiply instructions of every AArch64 CPU, and the CRC
 * instruction. Activations are broadcast four at a time, so that a 16-bit lane belongs to one row
 * and one column of each four; lanes are added in pairs when sums are widened to 32 bits.
 */
#include "../kernels.h"

#if defined(__aarch64__)

#include "../groups.h"
#include "k4v8_cache.h"
#include "lanes.h"
#include "lines.h"
#include "rows.h"
#include "trits.h"

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

INLINE int32x4_t dot_fours(int32x4_t sum, int8x16_t a, int8x16_t b) {
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

/* Adds the products of both halves of a register in 16 bits, which hold two, at most 2·128·127. */
INLINE int32x4_t dot_halves(int32x4_t sum, int8x16_t a, int8x16_t b) {
    return vpadalq_s16(sum, vmlal_high_s8(vmull_s8(vget_low_s8(a), vget_low_s8(b)), a, b));
}

/* Tiles until a 16-bit sum could overflow: 4 products of at most 3·127 (code 3) each. */
enum { STRETCH_TILES = 32767 / (4 * 3 * 127) };

/* x = the 4 activations of field f in all 4 words. A compiler that knows both halves of x to be the
 * same would not use the instructions that multiply upper halves. */
#define BROADCAST(x, q, f)                                                                         \
    do {                                                                                           \
        x = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(q), f));                     \
        KEEP(x);                                                                                   \
    } while (0)

/* acc[t][row] += 16 rows × at most STRETCH_TILES tiles, for `tokens` (a constant, 1 or 2). */
INLINE void ternary_stretch(int32_t *acc, size_t acc_stride, const uint8_t *group, size_t tiles,
                            const int8_t *q, size_t q_stride, const size_t tokens) {
    int16x8_t sum[2][8]; /* [token][pair of rows] */
    UNROLL
    for (int i = 0; i < 8; i++)
        sum[0][i] = sum[1][i] = vdupq_n_s16(0);
    for (size_t i = 0; i < tiles; i++, q += BN_TERNARY_TILE_K) {
        int8x16_t x[2][4];
        UNROLL
        for (size_t t = 0; t < tokens; t++) {
            const int8x16_t all = vld1q_s8(q + t * q_stride);
            BROADCAST(x[t][0], all, 0);
            BROADCAST(x[t][1], all, 1);
            BROADCAST(x[t][2], all, 2);
            BROADCAST(x[t][3], all, 3);
        }
        UNROLL
        for (int g = 0; g < 4; g++, group += 16) {
            int8x16_t field[4];
            ternary_fields(field, group);
            UNROLL
            for (int f = 0; f < 4; f++) {
                UNROLL
                for (size_t t = 0; t < tokens; t++) {
                    sum[t][2 * g] =
                        vmlal_s8(sum[t][2 * g], vget_low_s8(field[f]), vget_low_s8(x[t][f]));
                    sum[t][2 * g + 1] = vmlal_high_s8(sum[t][2 * g + 1], field[f], x[t][f]);
                }
            }
        }
    }
    UNROLL
    for (size_t t = 0; t < tokens; t++) {
        UNROLL
        for (int g = 0; g < 4; g++) {
            int32_t *to = acc + t * acc_stride + 4 * g;
            const int32x4_t a = vpaddlq_s16(sum[t][2 * g]), b = vpaddlq_s16(sum[t][2 * g + 1]);
            vst1q_s32(to, vaddq_s32(vld1q_s32(to), vpaddq_s32(a, b)));
        }
    }
}

static void ternary_matmul(const bn_matmul *m) {
    clear(m);
    for (size_t p = 0; p < m->panels; p++) {
        for (size_t first = 0; first < m->k_tiles; first += STRETCH_TILES) {
            const size_t left = m->k_tiles - first;
            const size_t tiles = left < STRETCH_TILES ? left : STRETCH_TILES;
            const uint8_t *tile = m->tiles + p * m->panel_stride + first * BN_TILE_BYTES;
            int32_t *acc = m->acc + p * BN_PANEL;
            const int8_t *q = m->q + first * BN_TERNARY_TILE_K;
            size_t t = 0;
            for (; t + 2 <= m->tokens; t += 2)
                ternary_stretch(acc + t * m->acc_stride, m->acc_stride, tile, tiles,
                                q + t * m->q_stride, m->q_stride, 2);
            if (t < m->tokens)
                ternary_stretch(acc + t * m->acc_stride, 0, tile, tiles, q + t * m->q_stride, 0, 1);
        }
    }
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    ternary_matmul(m);
    bn_neon_scale_sums(a);
}

static void ternary_grouped(const bn_grouped *m) {
    grouped_by(m, ternary_matmul, add_group);
}

static void trit_matmul(const bn_matmul *m) {
    trits_many(m, ternary_matmul);
}

static void int8_rows(const bn_int8_rows *m) {
    rows_all(m, dot_halves);
}

static void ternary_rows(const bn_lines *m) {
    lines_rows(m, dot_fours);
}

static void ternary_columns(const bn_lines *m) {
    lines_columns(m, dot_fours);
}

#if defined(__ARM_FEATURE_CRC32)
static uint32_t crc32(uint32_t crc, const uint8_t *p, size_t n) {
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, sizeof word);
        crc = __crc32d(crc, word);
    }
    for (; n > 0; n--, p++)
        crc = __crc32b(crc, *p);
    return ~crc;
}
#endif

static void qk_k4v8(const bn_qk *a) {
    qk_k4_all(a, dot_fours);
}

static uint64_t int8_peak(uint64_t rounds, int32_t *sink) {
    int16x8_t sum[16];
    int8x16_t w = vdupq_n_s8((int8_t)(*sink & 3)), x = vdupq_n_s8((int8_t)(*sink & 63));
    UNROLL
    for (int i = 0; i < 16; i++)
        sum[i] = vdupq_n_s16((int16_t)i);
    for (uint64_t r = 0; r < rounds; r++) {
        KEEP(w); /* otherwise the product would be computed only once */
        UNROLL
        for (int i = 0; i < 16; i++)
            sum[i] = vmlal_high_s8(sum[i], w, x);
    }
    UNROLL
    for (int i = 1; i < 16; i++)
        sum[0] = vaddq_s16(sum[0], sum[i]);
    *sink = vaddvq_s16(sum[0]);
    return rounds * 16 * 8;
}

int bn_kernels_neon(bn_kernels *table) {
    bn_kernels_neon_float(table);
    bn_kernels_neon_scale(table);
    bn_kernels_neon_attention(table);
    table->products.ternary_matmul = ternary_matmul;
    table->products.ternary_scaled = ternary_scaled;
    table->products.sketch_matmul = ternary_matmul;
    table->products.trit_matmul = trit_matmul;
    table->products.ternary_grouped = ternary_grouped;
    table->products.int8_rows = int8_rows;
    table->products.ternary_rows = ternary_rows;
    table->products.ternary_columns = ternary_columns;
#if defined(__ARM_FEATURE_CRC32)
    table->bytes.crc32 = crc32;
#endif
    table->attention[BN_KV_K4V8].qk = qk_k4v8;
    table->products.int8_peak = int8_peak;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_neon)
#endif
