/* SPDX-License-Identifier: MIT
 *
 * rows.h: products of int8 rows. Codes and activations have the same order, so a lane sums some
 * columns of one row, and the lanes are added at the end. dot adds 16 products of bytes to the four
 * lanes of sum, in any assignment.
 */
#ifndef BITNET_ARM_ROWS_H
#define BITNET_ARM_ROWS_H

#include "arm.h"

enum { ROWS_BLOCK = 4 };

/* One row and token: limited by memory; four sums hide the latency of the instruction. */
INLINE int32_t row_product(const int8_t *codes, const int8_t *q, size_t n, dot_fn *dot) {
    int32x4_t sum[4];
    UNROLL
    for (int i = 0; i < 4; i++)
        sum[i] = vdupq_n_s32(0);
    for (size_t k = 0; k < n; k += BN_INT8_UNIT) {
        UNROLL
        for (int i = 0; i < 4; i++)
            sum[i] = dot(sum[i], vld1q_s8(codes + k + 16 * i), vld1q_s8(q + k + 16 * i));
    }
    return vaddvq_s32(vaddq_s32(vaddq_s32(sum[0], sum[1]), vaddq_s32(sum[2], sum[3])));
}

/* ROWS_BLOCK rows × `tokens` (a constant, at most 4): a register of codes serves all of them. */
INLINE void rows_block(int32_t *acc, size_t acc_stride, const int8_t *codes, size_t row_bytes,
                       const int8_t *q, size_t q_stride, dot_fn *dot, const size_t tokens) {
    int32x4_t sum[ROWS_BLOCK][4];
    UNROLL
    for (size_t r = 0; r < ROWS_BLOCK; r++)
        sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = vdupq_n_s32(0);
    for (size_t k = 0; k < row_bytes; k += 16) {
        int8x16_t x[4];
        UNROLL
        for (size_t t = 0; t < tokens; t++)
            x[t] = vld1q_s8(q + t * q_stride + k);
        UNROLL
        for (size_t r = 0; r < ROWS_BLOCK; r++) {
            const int8x16_t c = vld1q_s8(codes + r * row_bytes + k);
            UNROLL
            for (size_t t = 0; t < tokens; t++)
                sum[r][t] = dot(sum[r][t], c, x[t]);
        }
    }
    UNROLL
    for (size_t t = 0; t < tokens; t++) {
        UNROLL
        for (size_t r = 0; r < ROWS_BLOCK; r++)
            acc[t * acc_stride + r] = vaddvq_s32(sum[r][t]);
    }
}

/* ROWS_BLOCK rows × all tokens. */
INLINE void rows_tokens(const bn_int8_rows *m, size_t row, dot_fn *dot) {
    const int8_t *codes = m->codes + row * m->row_bytes;
    for (size_t t = 0; t < m->tokens; t += 4) {
        int32_t *acc = m->acc + t * m->acc_stride + row;
        const int8_t *q = m->q + t * m->q_stride;
        switch (m->tokens - t) {
        case 1:
            rows_block(acc, m->acc_stride, codes, m->row_bytes, q, m->q_stride, dot, 1);
            break;
        case 2:
            rows_block(acc, m->acc_stride, codes, m->row_bytes, q, m->q_stride, dot, 2);
            break;
        case 3:
            rows_block(acc, m->acc_stride, codes, m->row_bytes, q, m->q_stride, dot, 3);
            break;
        default:
            rows_block(acc, m->acc_stride, codes, m->row_bytes, q, m->q_stride, dot, 4);
        }
    }
}

/* Prefetches a listed row: the hardware cannot predict listed rows as a stream. */
INLINE void fetch_listed(const bn_int8_rows *m, size_t r) {
    if (m->list && r < m->rows)
        for (size_t k = 0; k < m->row_bytes; k += BN_INT8_UNIT)
            __builtin_prefetch(bn_int8_row_at(m, r) + k);
}

INLINE void rows_all(const bn_int8_rows *m, dot_fn *dot) {
    size_t r = 0;
    for (; m->tokens > 1 && r + ROWS_BLOCK <= m->rows; r += ROWS_BLOCK)
        rows_tokens(m, r, dot);
    for (; r < m->rows; r++) {
        fetch_listed(m, r + 1);
        for (size_t t = 0; t < m->tokens; t++)
            m->acc[t * m->acc_stride + r] =
                row_product(bn_int8_row_at(m, r), m->q + t * m->q_stride, m->row_bytes, dot);
    }
}

#endif
