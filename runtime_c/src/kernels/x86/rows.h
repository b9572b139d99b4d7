/* SPDX-License-Identifier: MIT
 *
 * rows.h: products of int8 rows and activations: a register of columns at a time, whose lanes are
 * added at the end. Rows are read as one linear stream, the fastest way to read memory; loaded
 * codes serve up to 8 tokens, whose activations stay in the L1 cache. Listed rows are processed
 * four at a time while the next four are prefetched.
 */
#ifndef BITNET_X86_ROWS_H
#define BITNET_X86_ROWS_H

#include "integer.h"

/* acc[t][0..rows) for T <= 8 tokens. flip: 0x80 if dot takes codes as unsigned bytes with 128
 * added, else 0. */
INLINE void rows_block(const bn_int8_rows *m, size_t token, dot_fn *dot, const int flip,
                       const size_t T) {
    const int8_t *codes = m->codes, *q = m->q + token * m->q_stride;
    int32_t *acc = m->acc + token * m->acc_stride;
    for (size_t row = 0; row < m->rows; row++, codes += m->row_bytes) {
        sums sum[8];
        UNROLL
        for (size_t t = 0; t < T; t++)
            sum[t] = sums_zero();
        for (size_t k = 0; k < m->row_bytes; k += sizeof(bytes)) {
            const bytes c = bytes_xor(bytes_load(codes + k), bytes_fill(flip));
            UNROLL
            for (size_t t = 0; t < T; t++)
                sum[t] = dot(sum[t], c, bytes_load(q + t * m->q_stride + k));
        }
        UNROLL
        for (size_t t = 0; t < T; t++)
            acc[t * m->acc_stride + row] = sums_total(sum[t]) - flip * m->q_sums[token + t];
    }
}

enum { LISTED = 4 /* rows */ };

INLINE void listed_rows(const bn_int8_rows *m, dot_fn *dot, const int flip) {
    const int32_t less = flip * *m->q_sums;
    const size_t last = m->rows - 1;
    for (size_t row = 0; row < m->rows; row += LISTED) {
        const int8_t *codes[LISTED], *next[LISTED];
        sums sum[LISTED];
        UNROLL
        for (size_t r = 0; r < LISTED; r++) { /* past the end: the last row again */
            codes[r] = bn_int8_row_at(m, bn_min(row + r, last));
            next[r] = bn_int8_row_at(m, bn_min(row + r + LISTED, last));
            sum[r] = sums_zero();
        }
        for (size_t k = 0; k < m->row_bytes; k += sizeof(bytes)) {
            const bytes q = bytes_load(m->q + k);
            UNROLL
            for (size_t r = 0; r < LISTED; r++) {
                if (k % BN_INT8_UNIT == 0)
                    _mm_prefetch((const char *)next[r] + k, _MM_HINT_T0);
                sum[r] = dot(sum[r], bytes_xor(bytes_load(codes[r] + k), bytes_fill(flip)), q);
            }
        }
        const __m128i total = _mm_sub_epi32(sums_totals(sum), _mm_set1_epi32(less));
        if (row + LISTED <= m->rows)
            _mm_storeu_si128((__m128i *)(m->acc + row), total);
        else
            memcpy(m->acc + row, &total, (m->rows - row) * sizeof *m->acc);
    }
}

INLINE void rows_all(const bn_int8_rows *m, dot_fn *dot, const int flip) {
    size_t t = 0;
    if (m->list) {
        listed_rows(m, dot, flip);
        return;
    }
    for (; t + 8 <= m->tokens; t += 8)
        rows_block(m, t, dot, flip, 8);
    for (; t + 4 <= m->tokens; t += 4)
        rows_block(m, t, dot, flip, 4);
    for (; t + 2 <= m->tokens; t += 2)
        rows_block(m, t, dot, flip, 2);
    if (t < m->tokens)
        rows_block(m, t, dot, flip, 1);
}

#endif
