/* SPDX-License-Identifier: MIT
 *
 * int8_cache.h: scores of int8 queries with int8 keys, and integer weights times int8 values. A
 * word of four dimensions of a query is broadcast against that word of the keys in a register, the
 * weights of four keys against their values in each dimension of a register; four queries share
 * what is loaded.
 *
 * flip: 0x80 where dot takes codes as unsigned bytes, 128 too large, else 0; 128·Σq takes it away
 * again.
 */
#ifndef BITNET_X86_INT8_CACHE_H
#define BITNET_X86_INT8_CACHE_H

#include "integer.h"

#define EACH_QUERY_OF_4(X) X(0) X(1) X(2) X(3)

/* The keys in one register, and Q queries. */
INLINE void qk_int8_keys(float *scores, size_t score_stride, const int8_t *q, size_t q_row,
                         const float *q_scale, const sums *start, const int8_t *k, size_t words,
                         dot_fn *dot, const int flip_byte, const int Q) {
    enum { WORD = BN_LANES * 4 };
    sums even[4], odd[4]; /* two chains hide the latency */
    const bytes flip = bytes_fill(flip_byte);
#define CLEAR(i) even[i] = start[i], odd[i] = sums_zero();
    EACH_QUERY_OF_4(CLEAR)
#undef CLEAR
    size_t w = 0;
    for (; w + 2 <= words; w += 2) {
        const bytes a = bytes_xor(bytes_load(k + w * WORD), flip);
        const bytes b = bytes_xor(bytes_load(k + (w + 1) * WORD), flip);
        prefetch_cache(k + w * WORD, 0), prefetch_cache(k + (w + 1) * WORD, 0);
#define TERM(i)                                                                                    \
    if (i < Q) {                                                                                   \
        even[i] = dot(even[i], a, bytes_spread(q + i * q_row + 4 * w));                            \
        odd[i] = dot(odd[i], b, bytes_spread(q + i * q_row + 4 * w + 4));                          \
    }
        EACH_QUERY_OF_4(TERM)
#undef TERM
    }
    if (w < words) {
        const bytes a = bytes_xor(bytes_load(k + w * WORD), flip);
#define TERM(i)                                                                                    \
    if (i < Q)                                                                                     \
        even[i] = dot(even[i], a, bytes_spread(q + i * q_row + 4 * w));
        EACH_QUERY_OF_4(TERM)
#undef TERM
    }
    const vec scale = vec_load((const float *)(const void *)(k + words * WORD));
#define STORE(i)                                                                                   \
    if (i < Q)                                                                                     \
        vec_store(scores + i * score_stride, vec_mul(vec_from_int(sums_add(even[i], odd[i])),      \
                                                     vec_mul(vec_set(q_scale[i]), scale)));
    EACH_QUERY_OF_4(STORE)
#undef STORE
}

/* What a sum of Q queries starts with: -128·Σq where codes get 128 added. */
INLINE void qk_int8_start(sums *start, const int8_t *q, size_t q_row, const int flip, const int Q) {
    for (int i = 0; i < 4; i++) {
        int32_t total = 0;
        for (size_t d = 0; flip != 0 && i < Q && d < q_row; d++)
            total += q[(size_t)i * q_row + d];
        start[i] = sums_zero() - 128 * total;
    }
}

INLINE void qk_int8_queries(float *scores, size_t score_stride, const int8_t *q, size_t q_row,
                            const float *q_scale, const int8_t *k, size_t words, size_t tiles,
                            dot_fn *dot, const int flip, const int Q) {
    sums start[4];
    qk_int8_start(start, q, q_row, flip, Q);
    for (size_t t = 0; t < tiles; t++, k += (words + 1) * BN_LANES * 4)
        for (size_t key = 0; key < BN_LANES; key += VEC_ROWS)
            qk_int8_keys(scores + t * BN_LANES + key, score_stride, q, q_row, q_scale, start,
                         k + 4 * key, words, dot, flip, Q);
}

INLINE void qk_int8_all(const bn_qk *all, dot_fn *dot, const int flip) {
    const bn_qk a = *all; /* in registers: no store can change it */
    const size_t words = (a.head_dim + 3) / 4, q_row = bn_q_row(a.head_dim);
    size_t i = 0;
    for (; i + 4 <= a.n_q; i += 4)
        qk_int8_queries(a.scores + i * a.score_stride, a.score_stride, a.codes + i * q_row, q_row,
                        a.q_scale + i, a.k, words, a.tiles, dot, flip, 4);
    for (; i < a.n_q; i++)
        qk_int8_queries(a.scores + i * a.score_stride, a.score_stride, a.codes + i * q_row, q_row,
                        a.q_scale + i, a.k, words, a.tiles, dot, flip, 1);
}

/* Q queries, R registers of dimensions, of which the last begins at `last`, as far as that is in
 * the one before it: what both have is added up in both. */
INLINE void pv_int8_block(int32_t *out, size_t head_dim, const uint8_t *codes, size_t p_stride,
                          const int8_t *v, size_t keys, size_t last, int fetch, dot_fn *dot,
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
        for (size_t r = 0; r < R; r++) {
            const int8_t *at = v + GROUP * (r + 1 < R ? r * VEC_ROWS : last);
            value[r] = bytes_load(at);
            if (fetch)
                prefetch_cache(at, 0);
        }
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

/* The n < VEC_ROWS dimensions of heads that have no more, padded on their way to the registers. */
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

/* Blocks of 1 to 3 registers (2 where there are few), as even as can be. */
INLINE void pv_int8_queries(const bn_pv *a, size_t i, dot_fn *dot, const size_t Q) {
    enum { SIDE = REGISTERS == 32 ? 3 : 2 };
    const size_t E = a->head_dim, n = (E + VEC_ROWS - 1) / VEC_ROWS, blocks = (n + SIDE - 1) / SIDE;
    for (size_t b = 0; b < blocks; b++) {
        const size_t first = n * b / blocks, end = n * (b + 1) / blocks, d = first * VEC_ROWS;
        const size_t last = (end < n ? end * VEC_ROWS : E) - VEC_ROWS - d;
        int32_t *out = a->sums + i * E + d;
        const uint8_t *codes = a->codes + i * a->p_stride;
        const int8_t *v = (const int8_t *)a->v + BN_VALUE_GROUP * d;
#define BLOCK(R)                                                                                   \
    case R:                                                                                        \
        pv_int8_block(out, E, codes, a->p_stride, v, a->keys, last, i == 0, dot, Q, R);            \
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
    const bn_pv a = *all;
    size_t i = 0;
    if (a.head_dim < VEC_ROWS) {
        for (; i < a.n_q; i++)
            pv_int8_narrow(a.sums + i * a.head_dim, a.head_dim, a.codes + i * a.p_stride, a.v,
                           a.keys);
        return;
    }
    for (; REGISTERS == 32 && i + 4 <= a.n_q; i += 4)
        pv_int8_queries(&a, i, dot, 4);
    for (; i + 2 <= a.n_q; i += 2)
        pv_int8_queries(&a, i, dot, 2);
    for (; i < a.n_q; i++)
        pv_int8_queries(&a, i, dot, 1);
}

#endif
