/* SPDX-License-Identifier: MIT
 *
 * k4v8_cache.h: scores of int8 queries with 4-bit keys. A word of four query dimensions is
 * broadcast against the same word of the keys in a register; up to four queries share the loaded
 * and unpacked keys. Key codes are doubled, and the sums of each group of 32 dimensions start at
 * -15·Σq, which gives Σ(2 code - 15)·q.
 */
#ifndef BITNET_X86_K4V8_CACHE_H
#define BITNET_X86_K4V8_CACHE_H

#include "integer.h"

enum { K4_WORD = BN_LANES * 4, K4_GROUPS = BN_MAX_HEAD / BN_NIBBLE_GROUP };

typedef struct k4_queries {
    const int8_t *q;
    size_t q_row, n;
    const float *scale;
    int32_t start[4][K4_GROUPS]; /* start values of the sums, -15·Σq */
} k4_queries;

/* score[i] += the product of query i with a group of up to 4 words, times the scale of each key. */
INLINE void qk_k4_group(vec score[4], const k4_queries *q, size_t group, const uint8_t *k,
                        size_t words, vec scale, fetching *fetch, dot_fn *dot, const size_t Q) {
    sums sum[4];
    const bytes field = bytes_fill(30); /* twice a code */
    UNROLL
    for (size_t i = 0; i < Q; i++)
        sum[i] = sums_zero() + q->start[i][group];
    for (size_t w = 0; w < words; w++) {
        const bytes both = bytes_load(k + w * K4_WORD);
        const bytes a = bytes_and(bytes_shl(both, 1), field),
                    b = bytes_and(bytes_shr(both, 3), field);
        const int8_t *x = q->q + group * BN_NIBBLE_GROUP + 8 * w;
        fetch_next(fetch);
        UNROLL
        for (size_t i = 0; i < Q; i++, x += q->q_row) {
            sum[i] = dot(sum[i], a, bytes_spread(x));
            sum[i] = dot(sum[i], b, bytes_spread(x + 4));
        }
    }
    UNROLL
    for (size_t i = 0; i < Q; i++)
        score[i] = vec_fma(vec_from_int(sum[i]), scale, score[i]);
}

/* Scores of Q queries with the keys in one register. */
INLINE void qk_k4_keys(float *scores, size_t score_stride, const k4_queries *q, const uint8_t *k,
                       size_t head_dim, fetching fetch, dot_fn *dot, const size_t Q) {
    enum { GROUP_WORDS = BN_NIBBLE_GROUP / 8 };
    vec score[4];
    UNROLL
    for (size_t i = 0; i < Q; i++)
        score[i] = vec_zero();
    for (size_t group = 0, left = (head_dim + 7) / 8; left > 0; group += 2) {
        const size_t words = bn_min(left, 2 * GROUP_WORDS), first = bn_min(left, GROUP_WORDS);
        const bytes scales = bytes_load(k + words * K4_WORD);
        qk_k4_group(score, q, group, k, first, vec_lower_half(scales), &fetch, dot, Q);
        qk_k4_group(score, q, group + 1, k + GROUP_WORDS * K4_WORD, words - first,
                    vec_upper_half(scales), &fetch, dot, Q);
        k += (words + 1) * K4_WORD;
        left -= words;
    }
    UNROLL
    for (size_t i = 0; i < Q; i++)
        vec_store(scores + i * score_stride, vec_mul(score[i], vec_set(q->scale[i])));
}

INLINE void qk_k4_queries(const bn_qk *a, size_t first, dot_fn *dot, const size_t Q) {
    const size_t E = a->head_dim, q_row = bn_q_row(E), words = bn_nibble_words(E);
    k4_queries q = {.q = a->codes + first * q_row, .q_row = q_row, .scale = a->q_scale + first};
    for (size_t i = 0; i < Q; i++)
        for (size_t g = 0; g * BN_NIBBLE_GROUP < E; g++) {
            const int8_t *x = q.q + i * q_row + g * BN_NIBBLE_GROUP;
            int32_t total = 0;
            for (int d = 0; d < BN_NIBBLE_GROUP; d++)
                total += x[d];
            q.start[i][g] = -15 * total;
        }
    const size_t tile = words * K4_WORD, turns = (a->n_q + 3) / 4 * PARTS;
    for (size_t t = 0; t < a->tiles; t++)
        for (size_t part = 0; part < PARTS; part++) {
            const uint8_t *k = (const uint8_t *)a->k + t * tile;
            const size_t key = part * VEC_ROWS;
            qk_k4_keys(
                a->scores + first * a->score_stride + t * BN_LANES + key, a->score_stride, &q,
                k + 4 * key, E,
                fetch_share(k + a->ahead, tile, (E + 7) / 8, first / 4 * PARTS + part, turns), dot,
                Q);
        }
}

INLINE void qk_k4_all(const bn_qk *all, dot_fn *dot) {
    enum { TILES = 8 };
    const size_t tile = bn_nibble_words(all->head_dim) * K4_WORD;
    bn_qk a = *all; /* local copy: stores cannot alias it */
    for (size_t t = 0; t < all->tiles; t += TILES) {
        size_t i = 0;
        a.tiles = bn_min(all->tiles - t, TILES);
        a.k = (const uint8_t *)all->k + t * tile;
        a.scores = all->scores + t * BN_LANES;
        for (; i + 4 <= a.n_q; i += 4)
            qk_k4_queries(&a, i, dot, 4);
        if (a.n_q - i == 3)
            qk_k4_queries(&a, i, dot, 3);
        else if (a.n_q - i == 2)
            qk_k4_queries(&a, i, dot, 2);
        else if (a.n_q - i == 1)
            qk_k4_queries(&a, i, dot, 1);
    }
}

#endif
