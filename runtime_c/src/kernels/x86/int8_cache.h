/* SPDX-License-Identifier: MIT
 *
 * int8_cache.h: scores of int8 queries with int8 keys, and integer weights times int8 values. A
 * word of four query dimensions is broadcast against the same word of the keys in a register, and
 * the weights of four keys against their values in each dimension of a register. Loaded values
 * serve up to four queries, loaded keys up to eight.
 *
 * flip: 0x80 if dot takes codes as unsigned bytes with 128 added, else 0; subtracting 128·Σq
 * corrects for it.
 */
#ifndef BITNET_X86_INT8_CACHE_H
#define BITNET_X86_INT8_CACHE_H

#include "integer.h"

enum { INT8_STARTS = 32 }; /* most queries of a group, whose start values are computed together */

/* Scores of Q queries with R registers of keys. */
INLINE void qk_int8_keys(float *scores, size_t score_stride, const int8_t *q, size_t q_row,
                         const float *q_scale, const int32_t *start, const int8_t *k, size_t words,
                         fetching fetch, dot_fn *dot, const int flip_byte, const size_t Q,
                         const size_t R) {
    enum { WORD = BN_LANES * 4 };
    const size_t tile = (words + 1) * WORD; /* the scales are the last word */
    const bytes flip = bytes_fill(flip_byte);
    sums sum[QK_MANY][4];
#define AT(r) (k + r / PARTS * tile + r % PARTS * sizeof(bytes))
    UNROLL
    for (size_t i = 0; i < Q; i++) {
        UNROLL
        for (size_t r = 0; r < R; r++)
            sum[i][r] = sums_zero() + start[i];
    }
    for (size_t w = 0; w < words; w++) {
        bytes key[4];
        fetch_next(&fetch);
        UNROLL
        for (size_t r = 0; r < R; r++)
            key[r] = bytes_xor(bytes_load(AT(r) + w * WORD), flip);
        UNROLL
        for (size_t i = 0; i < Q; i++) {
            const bytes x = bytes_spread(q + i * q_row + 4 * w);
            UNROLL
            for (size_t r = 0; r < R; r++)
                sum[i][r] = dot(sum[i][r], key[r], x);
        }
    }
    UNROLL
    for (size_t r = 0; r < R; r++) {
        const vec scale = vec_load((const float *)(const void *)(AT(r) + words * WORD));
        UNROLL
        for (size_t i = 0; i < Q; i++)
            vec_store(scores + i * score_stride + r * VEC_ROWS,
                      vec_mul(vec_from_int(sum[i][r]), vec_mul(vec_set(q_scale[i]), scale)));
    }
#undef AT
}

/* Takes as many registers of keys at a time as there are registers left for their sums. */
INLINE void qk_int8_queries(const bn_qk *a, size_t i, const int32_t *start, size_t turn,
                            size_t turns, dot_fn *dot, const int flip, const size_t Q) {
    const size_t words = (a->head_dim + 3) / 4, q_row = bn_q_row(a->head_dim);
    const size_t tile = (words + 1) * BN_LANES * 4, n = a->tiles * PARTS;
    const int8_t *q = a->codes + i * q_row, *k = a->k;
    float *scores = a->scores + i * a->score_stride;
    size_t done = 0;
#define BLOCK(R)                                                                                   \
    for (; Q * R <= REGISTERS / 2 && done + R <= n; done += R, k += R / PARTS * tile)              \
        qk_int8_keys(scores + done * VEC_ROWS, a->score_stride, q, q_row, a->q_scale + i,          \
                     start + i, k, words,                                                          \
                     fetch_share(k + a->ahead, R / PARTS * tile, words, turn, turns), dot, flip,   \
                     Q, R);
    BLOCK(4)
    BLOCK(2)
    BLOCK(1)
#undef BLOCK
}

/* At most INT8_STARTS queries. A few key tiles are multiplied with all queries before the next
 * ones, so that the keys stay in L1. Sums start at -128·Σq if codes have 128 added. */
INLINE void qk_int8_group(const bn_qk *group, dot_fn *dot, const int flip) {
    enum { TILES = 4 };
    const size_t tile = ((group->head_dim + 3) / 4 + 1) * BN_LANES * 4;
    const size_t q_row = bn_q_row(group->head_dim), n_q = group->n_q;
    const size_t turns = n_q / QK_MANY + (n_q % QK_MANY + 3) / 4;
    bn_qk a = *group; /* local copy: stores cannot alias it */
    int32_t start[INT8_STARTS] = {0};
    for (size_t i = 0; i < n_q && flip != 0; i++) {
        int32_t total = 0;
        for (size_t d = 0; d < q_row; d++)
            total += a.codes[i * q_row + d];
        start[i] = -128 * total;
    }
    for (size_t t = 0; t < group->tiles; t += TILES) {
        size_t i = 0, turn = 0;
        a.tiles = bn_min(group->tiles - t, TILES);
        a.k = (const int8_t *)group->k + t * tile;
        a.scores = group->scores + t * BN_LANES;
        for (; i + QK_MANY <= n_q; i += QK_MANY, turn++)
            qk_int8_queries(&a, i, start, turn, turns, dot, flip, QK_MANY);
        for (; i + 4 <= n_q; i += 4, turn++)
            qk_int8_queries(&a, i, start, turn, turns, dot, flip, 4);
        if (n_q - i == 3)
            qk_int8_queries(&a, i, start, turn, turns, dot, flip, 3);
        else if (n_q - i == 2)
            qk_int8_queries(&a, i, start, turn, turns, dot, flip, 2);
        else if (n_q - i == 1)
            qk_int8_queries(&a, i, start, turn, turns, dot, flip, 1);
    }
}

INLINE void qk_int8_all(const bn_qk *all, dot_fn *dot, const int flip) {
    bn_qk group = *all;
    for (size_t i = 0; i < all->n_q; i += group.n_q) {
        group.n_q = bn_min(all->n_q - i, INT8_STARTS);
        group.codes = all->codes + i * bn_q_row(all->head_dim);
        group.q_scale = all->q_scale + i;
        group.scores = all->scores + i * all->score_stride;
        qk_int8_group(&group, dot, flip);
    }
}

/* Q queries, R registers of dimensions. The last register starts at `last` and may overlap the one
 * before it; the overlap is computed in both. */
INLINE void pv_int8_block(int32_t *out, size_t head_dim, const uint8_t *codes, size_t p_stride,
                          const int8_t *v, size_t keys, size_t last, fetching fetch, dot_fn *dot,
                          const size_t Q, const size_t R) {
    enum { GROUP = BN_VALUE_GROUP };
    sums high[4][3], low[4][3];
    UNROLL
    for (size_t i = 0; i < Q; i++) {
        UNROLL
        for (size_t r = 0; r < R; r++)
            high[i][r] = low[i][r] = sums_zero();
    }
    for (size_t t = 0; t < keys; t += GROUP, v += GROUP * head_dim) {
        const int8_t *word = (const int8_t *)codes + t / BN_LANES * 2 * BN_LANES + t % BN_LANES;
        bytes value[3];
        UNROLL
        for (size_t r = 0; r < R; r++)
            value[r] = bytes_load(v + GROUP * (r + 1 < R ? r * VEC_ROWS : last));
        fetch_next(&fetch);
        UNROLL
        for (size_t i = 0; i < Q; i++) {
            const bytes h = bytes_spread(word + i * p_stride);
            const bytes l = bytes_spread(word + i * p_stride + BN_LANES);
            UNROLL
            for (size_t r = 0; r < R; r++) {
                high[i][r] = dot(high[i][r], h, value[r]);
                low[i][r] = dot(low[i][r], l, value[r]);
            }
        }
    }
    UNROLL
    for (size_t i = 0; i < Q; i++) {
        sums sum[3];
        UNROLL
        for (size_t r = 0; r < R; r++)
            sum[r] = sums_add(sums_load(out + i * head_dim + (r + 1 < R ? r * VEC_ROWS : last)),
                              sums_add(high[i][r] << BN_WEIGHT_LOW, low[i][r]));
        UNROLL
        for (size_t r = 0; r < R; r++)
            sums_store(out + i * head_dim + (r + 1 < R ? r * VEC_ROWS : last), sum[r]);
    }
}

/* Heads of n < VEC_ROWS dimensions, without SIMD. */
static void pv_int8_narrow(int32_t *out, size_t n, const uint8_t *codes, const int8_t *v,
                           size_t keys) {
    for (size_t t = 0; t < keys; t += BN_VALUE_GROUP, v += BN_VALUE_GROUP * n)
        for (size_t j = 0; j < BN_VALUE_GROUP; j++) {
            const uint8_t *code = codes + t / BN_LANES * 2 * BN_LANES + t % BN_LANES + j;
            const int32_t weight = code[0] << BN_WEIGHT_LOW | code[BN_LANES];
            for (size_t d = 0; d < n; d++)
                out[d] += weight * v[d * BN_VALUE_GROUP + j];
        }
}

/* Blocks of 1 to 3 registers (2 with 16 registers), as even as possible. */
INLINE void pv_int8_queries(const bn_pv *a, size_t i, dot_fn *dot, const size_t Q) {
    enum { SIDE = REGISTERS == 32 ? 3 : 2 };
    const size_t E = a->head_dim, n = (E + VEC_ROWS - 1) / VEC_ROWS, blocks = (n + SIDE - 1) / SIDE;
    for (size_t b = 0; b < blocks; b++) {
        const size_t first = n * b / blocks, end = n * (b + 1) / blocks, d = first * VEC_ROWS;
        const size_t last = (end < n ? end * VEC_ROWS : E) - VEC_ROWS - d;
        int32_t *out = a->sums + i * E + d;
        const uint8_t *codes = a->codes + i * a->p_stride;
        const int8_t *v = (const int8_t *)a->v + BN_VALUE_GROUP * d;
        const size_t turn = i / QUERIES * blocks + b;
        const size_t turns = (a->n_q + QUERIES - 1) / QUERIES * blocks;
        const fetching fetch = fetch_share((const int8_t *)a->v + a->ahead, a->keys * E,
                                           a->keys / BN_VALUE_GROUP, turn, turns);
#define BLOCK(R)                                                                                   \
    case R:                                                                                        \
        pv_int8_block(out, E, codes, a->p_stride, v, a->keys, last, fetch, dot, Q, R);             \
        break
        switch (end - first) {
            BLOCK(1);
            BLOCK(2);
            BLOCK(3);
        }
#undef BLOCK
    }
}

INLINE void pv_int8_all(const bn_pv *all, dot_fn *dot) {
    enum { KEYS = 64 };
    bn_pv a = *all;
    size_t i = 0;
    if (a.head_dim < VEC_ROWS) {
        for (; i < a.n_q; i++)
            pv_int8_narrow(a.sums + i * a.head_dim, a.head_dim, a.codes + i * a.p_stride, a.v,
                           a.keys);
        return;
    }
    for (size_t t = 0; t < all->keys; t += KEYS) {
        a.keys = bn_min(all->keys - t, KEYS);
        a.v = (const int8_t *)all->v + t * a.head_dim;
        a.codes = all->codes + 2 * t;
        for (i = 0; REGISTERS == 32 && i + 4 <= a.n_q; i += 4)
            pv_int8_queries(&a, i, dot, 4);
        if (REGISTERS == 32 && a.n_q - i == 3) {
            pv_int8_queries(&a, i, dot, 3);
            i += 3;
        }
        for (; i + 2 <= a.n_q; i += 2)
            pv_int8_queries(&a, i, dot, 2);
        for (; i < a.n_q; i++)
            pv_int8_queries(&a, i, dot, 1);
    }
}

#endif
