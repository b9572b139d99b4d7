/* SPDX-License-Identifier: MIT
 *
 * int8_cache.h: scores of int8 queries with int8 keys. A word of four dimensions is broadcast
 * against that word of the keys in a register; four queries share what is loaded.
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

#endif
