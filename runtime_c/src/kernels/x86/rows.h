/* SPDX-License-Identifier: MIT
 *
 * rows.h: int8 codes row by row, times activations: a register of columns at a time, whose lanes
 * are added up at the end. Rows are one linear stream, which memory gives fastest; what is loaded
 * of a row serves up to 8 tokens, whose activations stay in the L1 cache.
 */
#ifndef BITNET_X86_ROWS_H
#define BITNET_X86_ROWS_H

#include "integer.h"

/* acc[t][0..rows) for T <= 8 tokens. flip: 0x80 where dot takes codes as unsigned bytes, 128 too
 * large, else 0. */
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

INLINE void rows_all(const bn_int8_rows *m, dot_fn *dot, const int flip) {
    size_t t = 0;
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
