/* SPDX-License-Identifier: MIT
 *
 * grouped.h: ternary weights with a scale for every 128 columns, with vpdpbusd. The integer sums of
 * a group live in registers only: they start at -Σq, which cancels the offset of the codes, and are
 * converted to floats and added to the totals at the end of the group.
 */
#ifndef BITNET_X86_GROUPED_H
#define BITNET_X86_GROUPED_H

#include "stream.h"

enum { GROUPED_MOST = 12 }; /* tokens: 12 sums, 12 totals, the tile and a field in 32 registers */
#define EACH_GROUPED(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define EACH_GROUPED_AND(X, n)                                                                     \
    X(0, n)                                                                                        \
    X(1, n) X(2, n) X(3, n) X(4, n) X(5, n) X(6, n) X(7, n) X(8, n) X(9, n) X(10, n) X(11, n)

INLINE sums sums_fill(int32_t a) {
    return sums_zero() + a;
}

/* One token. */
INLINE void grouped_vector(const bn_grouped *m, dot_fn *dot) {
    const uint8_t *tile = m->tiles;
    const uint16_t *scales = m->scales;
    for (size_t p = 0; p < m->panels; p++) {
        const int8_t *q = m->q;
        vec y[TILE_VECS];
        UNROLL
        for (int v = 0; v < TILE_VECS; v++)
            y[v] = vec_zero();
        for (size_t g = 0, left = m->k_tiles; left > 0; g++, scales += BN_PANEL) {
            sums sum[TILE_VECS][4];
            size_t tiles = bn_min(left, BN_GROUP_TILES);
            left -= tiles;
            UNROLL
            for (int v = 0; v < TILE_VECS; v++)
                sum[v][0] = sums_fill(-m->q_sums[g]),
                sum[v][1] = sum[v][2] = sum[v][3] = sums_zero();
            for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TERNARY_TILE_K) {
                prefetch(tile);
                UNROLL
                for (size_t v = 0; v < TILE_VECS; v++)
                    ternary_fields(sum[v], tile + v * sizeof(bytes), q, dot);
            }
            UNROLL
            for (int v = 0; v < TILE_VECS; v++)
                y[v] = vec_fma(vec_from_int(ternary_total(sum[v])),
                               vec_widen(scales + v * VEC_ROWS), y[v]);
        }
        UNROLL
        for (int v = 0; v < TILE_VECS; v++)
            vec_store(m->y + p * BN_PANEL + v * VEC_ROWS, y[v]);
    }
}

/* One register of rows, T tokens, each with `parts` partial sums to hide latency. */
INLINE void grouped_stream(float *y, size_t y_stride, const uint8_t *tile, size_t k_tiles,
                           const uint16_t *scales, const int8_t *q, size_t q_stride,
                           const int32_t *q_sums, size_t q_sums_stride, dot_fn *dot, const int T,
                           const int parts) {
    vec total[12];
#define CLEAR(t) total[t] = vec_zero();
    EACH_GROUPED(CLEAR)
#undef CLEAR
    for (; k_tiles > 0; q_sums++, scales += BN_PANEL) {
        const size_t tiles = bn_min(k_tiles, BN_GROUP_TILES);
        sums sum[12][4];
#define START(t)                                                                                   \
    if (t < T) {                                                                                   \
        sum[t][1] = sum[t][2] = sum[t][3] = sums_zero();                                           \
        sum[t][0] = sums_fill(-q_sums[t * q_sums_stride]);                                         \
    }
        EACH_GROUPED(START)
#undef START
        k_tiles -= tiles;
        for (size_t i = 0; i < tiles; i++, tile += BN_TILE_BYTES, q += BN_TERNARY_TILE_K) {
            prefetch(tile);
            const bytes codes = bytes_load(tile), three = bytes_fill(3);
#define DOT(t, f)                                                                                  \
    if (t < T)                                                                                     \
        sum[t][f % parts] = dot(sum[t][f % parts], field, bytes_spread(q + t * q_stride + 4 * f));
#define FIELD(f, shifted)                                                                          \
    {                                                                                              \
        const bytes field = bytes_and(shifted, three);                                             \
        EACH_GROUPED_AND(DOT, f)                                                                   \
    }
            FIELD(0, codes)
            FIELD(1, bytes_shr(codes, 2))
            FIELD(2, bytes_shr(codes, 4))
            FIELD(3, bytes_shr(codes, 6))
#undef FIELD
#undef DOT
        }
        const vec scale = vec_widen(scales);
#define ADD(t)                                                                                     \
    if (t < T)                                                                                     \
        total[t] =                                                                                 \
            vec_fma(vec_from_int(sum[t][0] + sum[t][1] + sum[t][2] + sum[t][3]), scale, total[t]);
        EACH_GROUPED(ADD)
#undef ADD
    }
#define PUT(t)                                                                                     \
    if (t < T)                                                                                     \
        vec_store(y + t * y_stride, total[t]);
    EACH_GROUPED(PUT)
#undef PUT
}

/* At least two tokens, in blocks of nearly equal size. */
INLINE void grouped_many(const bn_grouped *m, dot_fn *dot) {
    const size_t blocks = (m->tokens + GROUPED_MOST - 1) / GROUPED_MOST;
    const size_t n_groups = (m->k_tiles + BN_GROUP_TILES - 1) / BN_GROUP_TILES;
    for (size_t p = 0; p < m->panels; p++)
        for (size_t row = 0; row < BN_PANEL; row += VEC_ROWS)
            for (size_t b = 0; b < blocks; b++) {
                const size_t t = m->tokens * b / blocks;
                const uint8_t *tile = m->tiles + p * m->k_tiles * BN_TILE_BYTES + 4 * row;
                const uint16_t *scales = m->scales + p * n_groups * BN_PANEL + row;
                float *y = m->y + t * m->y_stride + p * BN_PANEL + row;
                const int8_t *q = m->q + t * m->q_stride;
                const int32_t *q_sums = m->q_sums + t * m->q_sums_stride;
#define BLOCK(T, parts)                                                                            \
    case T:                                                                                        \
        grouped_stream(y, m->y_stride, tile, m->k_tiles, scales, q, m->q_stride, q_sums,           \
                       m->q_sums_stride, dot, T, parts);                                           \
        break
                switch (m->tokens * (b + 1) / blocks - t) {
                    BLOCK(2, 4);
                    BLOCK(3, 2);
                    BLOCK(4, 2);
                    BLOCK(5, 2);
                    BLOCK(6, 1);
                    BLOCK(7, 1);
                    BLOCK(8, 1);
                    BLOCK(9, 1);
                    BLOCK(10, 1);
                    BLOCK(11, 1);
                    BLOCK(12, 1);
                }
#undef BLOCK
            }
}

#endif
