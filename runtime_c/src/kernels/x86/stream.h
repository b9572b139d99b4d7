/* SPDX-License-Identifier: MIT
 *
 * stream.h: integer products with vpdpbusd, which adds four products of unsigned and signed bytes
 * to a 32-bit lane: four columns of one row. A panel is one linear stream from memory into
 * registers, where it is unpacked once for up to `most` tokens, as many as registers have room for;
 * for more tokens it is read again from the cache.
 */
#ifndef BITNET_X86_STREAM_H
#define BITNET_X86_STREAM_H

#include "integer.h"

INLINE sums ternary_total(const sums sum[4]) {
    return sums_add(sums_add(sum[0], sums_shr(sum[1], 2)),
                    sums_add(sums_shr(sum[2], 4), sums_shr(sum[3], 6)));
}

/* One register of rows, T tokens. Fields are masked, not shifted: field f is scaled by 4^f and has
 * its own sum. */
INLINE void ternary_stream(int32_t *acc, size_t acc_stride, const uint8_t *tile, size_t tiles,
                           const int8_t *q, size_t q_stride, dot_fn *dot, const int T) {
    sums sum[6][4];
#define CLEAR(t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = sums_zero();
    EACH_TOKEN(CLEAR)
#undef CLEAR
    for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TERNARY_TILE_K) {
        prefetch(tile);
        const bytes codes = bytes_load(tile);
#define DOT(t, f)                                                                                  \
    if (t < T)                                                                                     \
        sum[t][f] = dot(sum[t][f], field, bytes_spread(q + t * q_stride + 4 * f));
#define FIELD(f)                                                                                   \
    {                                                                                              \
        const bytes field = bytes_and(codes, bytes_fill(3 << 2 * f));                              \
        EACH_TOKEN_AND(DOT, f)                                                                     \
    }
        FIELD(0)
        FIELD(1)
        FIELD(2)
        FIELD(3)
#undef FIELD
#undef DOT
    }
#define PUT(t)                                                                                     \
    if (t < T)                                                                                     \
        sums_store(acc + t * acc_stride, ternary_total(sum[t]));
    EACH_TOKEN(PUT)
#undef PUT
}

/* At least two tokens, in blocks of nearly equal size. */
INLINE void stream_tokens(const bn_matmul *m, dot_fn *dot, const int most) {
    const size_t blocks = (m->tokens + (size_t)most - 1) / (size_t)most;
    for (size_t p = 0; p < m->panels; p++)
        for (size_t row = 0; row < BN_PANEL; row += VEC_ROWS)
            for (size_t b = 0; b < blocks; b++) {
                const size_t t = m->tokens * b / blocks, at = p * m->panel_stride + 4 * row;
                int32_t *acc = m->acc + t * m->acc_stride + p * BN_PANEL + row;
                const int8_t *q = m->q + t * m->q_stride;
#define BLOCK(T)                                                                                   \
    case T:                                                                                        \
        if (T <= most)                                                                             \
            ternary_stream(acc, m->acc_stride, m->tiles + at, m->k_tiles, q, m->q_stride, dot, T); \
        break
                BY_TOKENS(m->tokens * (b + 1) / blocks - t, BLOCK)
#undef BLOCK
            }
}

/* One step of one register for a single token. Each tier keeps two registers in flight, so that
 * eight sums hide the latency of the instruction. */
INLINE void ternary_fields(sums sum[4], const uint8_t *tile, const int8_t *q, dot_fn *dot) {
    const bytes codes = bytes_load(tile);
    UNROLL
    for (int f = 0; f < 4; f++)
        sum[f] = dot(sum[f], bytes_and(codes, bytes_fill(3 << 2 * f)), bytes_spread(q + 4 * f));
}

#endif
