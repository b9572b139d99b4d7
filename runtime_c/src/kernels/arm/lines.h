/* SPDX-License-Identifier: MIT
 *
 * lines.h: integer products with the listed lines of a matrix, gathered from memory. Both kernels
 * iterate over the list in their inner loop and prefetch the same position of the line LINES_AHEAD
 * entries later: a single line is too short for the hardware to detect a stream.
 *
 * dot adds four products of bytes to a 32-bit lane.
 */
#ifndef BITNET_ARM_LINES_H
#define BITNET_ARM_LINES_H

#include "arm.h"

enum { LINES_AHEAD = 64 };

/* Loads the unit `at` bytes into the line of a list entry, and prefetches for a later one. */
INLINE uint8x16_t line_unit(const bn_lines *m, size_t entry, size_t at) {
    const size_t ahead = entry + LINES_AHEAD < m->n ? entry + LINES_AHEAD : m->n - 1;
    if (at % BN_TILE_BYTES == 0)
        __builtin_prefetch(m->lines + m->list[ahead] * m->line_bytes + at, 0, 2);
    return vld1q_u8(m->lines + m->list[entry] * m->line_bytes + at);
}

INLINE void lines_rows(const bn_lines *m, dot_fn *dot) {
    for (size_t first = 0; first < m->n; first += LINES_AHEAD) {
        const size_t n = m->n - first < LINES_AHEAD ? m->n - first : LINES_AHEAD;
        int32x4_t sum[LINES_AHEAD];
        for (size_t i = 0; i < n; i++)
            sum[i] = vdupq_n_s32(0);
        for (size_t k = 0; k < m->codes; k += BN_LINE_UNIT) {
            const int8_t *q = m->q + k;
            const int8x16_t x[4] = {vld1q_s8(q), vld1q_s8(q + 16), vld1q_s8(q + 32),
                                    vld1q_s8(q + 48)};
            for (size_t i = 0; i < n; i++) {
                int8x16_t field[4];
                ternary_fields_of(field, line_unit(m, first + i, k / 4));
                UNROLL
                for (int f = 0; f < 4; f++)
                    sum[i] = dot(sum[i], field[f], x[f]);
            }
        }
        for (size_t i = 0; i < n; i++)
            m->acc[first + i] = vaddvq_s32(sum[i]);
    }
}

/* Rows 64 u to 64 u + 63, of unit u at byte `at`. Interleaving four columns gives four rows per
 * register. */
INLINE void columns_pass(const bn_lines *m, size_t at, dot_fn *dot) {
    int32x4_t sum[4][4]; /* [four rows of 16][field] */
    UNROLL
    for (int p = 0; p < 4; p++)
        sum[p][0] = sum[p][1] = sum[p][2] = sum[p][3] = vdupq_n_s32(0);
    for (size_t i = 0; i < m->n; i += 4) {
        int32_t four;
        memcpy(&four, m->q + i, sizeof four);
        const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(four));
        const uint8x16_t a = line_unit(m, i, at), b = line_unit(m, i + 1, at);
        const uint8x16_t c = line_unit(m, i + 2, at), d = line_unit(m, i + 3, at);
        const uint16x8_t ab[2] = {vreinterpretq_u16_u8(vzip1q_u8(a, b)),
                                  vreinterpretq_u16_u8(vzip2q_u8(a, b))};
        const uint16x8_t cd[2] = {vreinterpretq_u16_u8(vzip1q_u8(c, d)),
                                  vreinterpretq_u16_u8(vzip2q_u8(c, d))};
        UNROLL
        for (int p = 0; p < 4; p++) {
            int8x16_t field[4];
            ternary_fields_of(field,
                              vreinterpretq_u8_u16(p % 2 ? vzip2q_u16(ab[p / 2], cd[p / 2])
                                                         : vzip1q_u16(ab[p / 2], cd[p / 2])));
            UNROLL
            for (int f = 0; f < 4; f++)
                sum[p][f] = dot(sum[p][f], field[f], q);
        }
    }
    UNROLL
    for (int p = 0; p < 4; p++) {
        UNROLL
        for (int f = 0; f < 4; f++) {
            int32_t *acc = m->acc + 4 * at + 16 * f + 4 * p;
            vst1q_s32(acc, vaddq_s32(vld1q_s32(acc), sum[p][f]));
        }
    }
}

INLINE void lines_columns(const bn_lines *m, dot_fn *dot) {
    for (size_t at = 0; at < m->codes / 4; at += 16)
        columns_pass(m, at, dot);
}

#endif
