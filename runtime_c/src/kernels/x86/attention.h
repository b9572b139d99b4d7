/* SPDX-License-Identifier: MIT
 *
 * attention.h: attention scores and weighted sums of values, shared by the x86 tiers. Keys, or the
 * elements of a value, are lanes. A loaded and widened register serves up to four queries, and a
 * broadcast query element up to eight registers of keys: 8 loads for 16 products, on cores that
 * load two registers and multiply two per cycle. With 32 registers it serves up to eight queries,
 * because widening a register of halves takes Intel's two ports as long as two products.
 */
#ifndef BITNET_X86_ATTENTION_H
#define BITNET_X86_ATTENTION_H

#include "float_rows.h"

/* X(query, vector) for four vectors, for four queries and for each query. */
#define EACH_FOUR(X, i) X(i, 0) X(i, 1) X(i, 2) X(i, 3)
#define FOUR_QUERIES(X) EACH_FOUR(X, 0) EACH_FOUR(X, 1) EACH_FOUR(X, 2) EACH_FOUR(X, 3)
#define EACH_QUERY(X)                                                                              \
    FOUR_QUERIES(X)                                                                                \
    EACH_FOUR(X, 4) EACH_FOUR(X, 5) EACH_FOUR(X, 6) EACH_FOUR(X, 7)

/* Most queries that share loaded values. */
enum { PV_MANY = REGISTERS == 32 ? 8 : QUERIES };

typedef struct qk_block {
    const float *q;    /* [Q][head_dim] */
    const uint8_t *k;  /* of the first tile */
    size_t size, tile; /* bytes of an element and of a tile */
    size_t head_dim;
    size_t ahead;
    size_t turn, turns; /* index and number of the query blocks that share the prefetching */
} qk_block;

/* Scores of Q queries with the keys in R registers. */
INLINE void qk_scores(float *scores, size_t score_stride, const qk_block *b, load_fn *load,
                      const size_t Q, const size_t R) {
    const size_t E = b->head_dim, tiles = (R + PARTS - 1) / PARTS;
    fetching fetch = fetch_share(b->k + b->ahead, tiles * b->tile, E, b->turn, b->turns);
    vec sum[QK_MANY][8], key[8];
    UNROLL
    for (size_t i = 0; i < Q; i++) {
        UNROLL
        for (size_t r = 0; r < R; r++)
            sum[i][r] = vec_zero();
    }
    for (size_t d = 0; d < E; d++) {
        fetch_next(&fetch);
        UNROLL
        for (size_t r = 0; r < R; r++) {
            const uint8_t *k = b->k + r / PARTS * b->tile + r % PARTS * LANES * b->size;
            key[r] = load(k, d * BN_LANES);
        }
        UNROLL
        for (size_t i = 0; i < Q; i++) {
            const vec x = vec_set(b->q[i * E + d]);
            UNROLL
            for (size_t r = 0; r < R; r++)
                sum[i][r] = vec_fma(key[r], x, sum[i][r]);
        }
    }
    UNROLL
    for (size_t i = 0; i < Q; i++) {
        UNROLL
        for (size_t r = 0; r < R; r++)
            vec_store(scores + i * score_stride + r * LANES, sum[i][r]);
    }
}

/* out[i][V registers] += p[i][t] * v[t], t = 0, 1, ... The last register starts at `last` and may
 * overlap the one before it; the overlap is computed in both. */
INLINE void pv_block(float *out, const float *p, size_t p_stride, const uint8_t *v, size_t size,
                     size_t head_dim, size_t keys, size_t last, fetching fetch, load_fn *load,
                     const int Q, const int V) {
    vec sum[8][4];
#define AT(c) (c + 1 < V ? c * LANES : last)
#define LOAD(i, c)                                                                                 \
    if (i < Q && c < V)                                                                            \
        sum[i][c] = vec_load(out + i * head_dim + AT(c));
    EACH_QUERY(LOAD)
#undef LOAD
    for (size_t t = 0; t < keys; t++, v += head_dim * size) {
        vec value[4];
        fetch_next(&fetch);
#define LOAD(i, c)                                                                                 \
    if (c < V)                                                                                     \
        value[c] = load(v, AT(c));
#define TERM(i, c)                                                                                 \
    if (i < Q && c < V)                                                                            \
        sum[i][c] = vec_fma(vec_set(p[i * p_stride + t]), value[c], sum[i][c]);
        EACH_FOUR(LOAD, 0)
        EACH_QUERY(TERM)
#undef LOAD
#undef TERM
    }
#define STORE(i, c)                                                                                \
    if (i < Q && c < V)                                                                            \
        vec_store(out + i * head_dim + AT(c), sum[i][c]);
    EACH_QUERY(STORE)
#undef STORE
#undef AT
}

/* One query and a head of n < LANES dimensions, zero-padded to a register. */
INLINE void pv_tail(float *out, size_t n, const float *p, const uint8_t *v, size_t size,
                    size_t head_dim, size_t keys, load_fn *load) {
    float end[LANES] = {0}, value[LANES] = {0};
    memcpy(end, out, n * sizeof *out);
    vec sum = vec_load(end);
    for (size_t t = 0; t < keys; t++, v += head_dim * size) {
        memcpy(value, v, n * size);
        sum = vec_fma(vec_set(p[t]), load(value, 0), sum);
    }
    vec_store(end, sum);
    memcpy(out, end, n * sizeof *out);
}

/* Blocks of 1 to 4 registers (3 with more than four queries), as even as possible. */
INLINE void pv_keys(float *out, const float *p, size_t p_stride, const uint8_t *v, size_t size,
                    size_t head_dim, size_t keys, size_t ahead, size_t turn, size_t turns,
                    load_fn *load, const int Q) {
    const int most = Q > 4 ? 3 : 4;
    const size_t n = (head_dim + LANES - 1) / LANES;
    const size_t blocks = (n + (size_t)most - 1) / (size_t)most;
    const size_t all = keys * head_dim * size;
    for (int i = 0; i < Q && head_dim < LANES; i++)
        pv_tail(out + (size_t)i * head_dim, head_dim, p + (size_t)i * p_stride, v, size, head_dim,
                keys, load);
    for (size_t b = 0; b < blocks && head_dim >= LANES; b++) {
        const size_t first = n * b / blocks, end = n * (b + 1) / blocks, d = first * LANES;
        const size_t last = (end < n ? end * LANES : head_dim) - LANES - d;
        const fetching share = fetch_share(v + ahead, all, keys, turn * blocks + b, turns * blocks);
#define BLOCK(V)                                                                                   \
    case V:                                                                                        \
        if (V <= most)                                                                             \
            pv_block(out + d, p, p_stride, v + d * size, size, head_dim, keys, last, share, load,  \
                     Q, V);                                                                        \
        break
        switch (end - first) {
            BLOCK(1);
            BLOCK(2);
            BLOCK(3);
            BLOCK(4);
        }
#undef BLOCK
    }
}

/* Q queries with n registers of keys, as many at a time as there are registers for their sums. */
INLINE void qk_keys(float *scores, size_t score_stride, qk_block b, size_t n, load_fn *load,
                    const size_t Q) {
    size_t done = 0;
#define BLOCK(R)                                                                                   \
    for (; Q * R <= REGISTERS / 2 && done + R <= n; done += R, b.k += R / PARTS * b.tile)          \
        qk_scores(scores + done * LANES, score_stride, &b, load, Q, R);
    BLOCK(8)
    BLOCK(4)
    BLOCK(2)
    BLOCK(1)
#undef BLOCK
}

/* A few keys with all queries before the next ones, so that the keys stay in L1. */
INLINE void qk(const bn_qk *all, size_t size, load_fn *load) {
    const bn_qk a = *all; /* local copy: stores cannot alias it */
    const size_t registers = a.tiles * PARTS, most = a.n_q == 1 ? 8 : 4, stride = a.score_stride;
    const size_t many = bn_like_intel ? QK_MANY : 4; /* Zen 4, 32 queries: 8 do 50 G/s, 4 do 53 */
    qk_block b = {.k = a.k,
                  .size = size,
                  .tile = a.head_dim * BN_LANES * size,
                  .head_dim = a.head_dim,
                  .ahead = a.ahead,
                  .turns = a.n_q / many + (a.n_q % many + 3) / 4};
    for (size_t key = 0, n; key < registers; key += n, b.k += n / PARTS * b.tile) {
        n = bn_min(registers - key, most);
        b.turn = 0;
        for (size_t i = 0, block; i < a.n_q; i += block, b.turn++) {
            const size_t left = a.n_q - i;
            float *s = a.scores + i * stride + key * LANES;
            b.q = a.q + i * a.head_dim;
            if ((block = left >= many ? many : bn_min(left, 4)) == QK_MANY)
                qk_keys(s, stride, b, n, load, QK_MANY);
            else if (block == 4)
                qk_keys(s, stride, b, n, load, 4);
            else if (block == 3)
                qk_keys(s, stride, b, n, load, 3);
            else if (block == 2)
                qk_keys(s, stride, b, n, load, 2);
            else
                qk_keys(s, stride, b, n, load, 1);
        }
    }
}

INLINE void pv(const bn_pv *all, size_t size, load_fn *load) {
    enum { KEYS = 64 };
    const bn_pv a = *all;
    const size_t E = a.head_dim, stride = a.p_stride;
    const size_t turns = a.n_q / PV_MANY + (a.n_q % PV_MANY + QUERIES - 1) / QUERIES;
    for (size_t t = 0; t < a.keys; t += KEYS) {
        const size_t keys = bn_min(a.keys - t, KEYS);
        const uint8_t *v = (const uint8_t *)a.v + t * E * size;
        for (size_t i = 0, block, turn = 0; i < a.n_q; i += block, turn++) {
            const size_t left = a.n_q - i;
            float *o = a.out + i * E;
            const float *p = a.p + i * stride + t;
#define BLOCK(Q) pv_keys(o, p, stride, v, size, E, keys, a.ahead, turn, turns, load, Q)
            if ((block = left >= PV_MANY ? PV_MANY : bn_min(left, QUERIES)) == PV_MANY)
                BLOCK(PV_MANY);
            else if (block == QUERIES)
                BLOCK(QUERIES);
            else if (block == 3)
                BLOCK(QUERIES - 1);
            else if (block == 2)
                BLOCK(2);
            else
                BLOCK(1);
#undef BLOCK
        }
    }
}

/* w[t] *= scale[t] for t in [low, high); returns the largest product in each lane. */
INLINE vec weigh_products(float *w, const float *scale, size_t low, size_t high) {
    vec largest = vec_set(BN_WEIGHT_LEAST);
    size_t t = low;
    for (; t + LANES <= high; t += LANES) {
        const vec x = vec_mul(vec_load(w + t), vec_load(scale + t));
        vec_store(w + t, x);
        largest = vec_most(vec_abs(x), largest);
    }
    if (t < high) {
        const vec x = vec_mul(vec_load_first(w + t, high - t), vec_load_first(scale + t, high - t));
        vec_store_first(w + t, x, high - t);
        largest = vec_most(vec_abs(x), largest);
    }
    return largest;
}

static float weigh(uint8_t *codes, float *w, const float *scale, size_t low, size_t high,
                   size_t n) {
    const float largest = vec_most_of(weigh_products(w, scale, low, high));
    const vec s = vec_set(BN_WEIGHT_MOST / largest);
    memset(w, 0, low * sizeof *w);
    memset(w + high, 0, (n - high) * sizeof *w);
    for (size_t t = 0; t < n; t += BN_LANES) {
        sums code[PARTS];
        UNROLL
        for (size_t p = 0; p < PARTS; p++)
            code[p] = vec_to_int(vec_max(vec_mul(vec_load(w + t + p * LANES), s), vec_zero()));
        UNROLL
        for (size_t p = 0; p < PARTS; p++) {
            uint8_t *to = codes + 2 * t + p * LANES;
            sums_store_bytes((int8_t *)to, sums_shr(code[p], BN_WEIGHT_LOW));
            sums_store_bytes((int8_t *)to + BN_LANES, code[p] & ((1 << BN_WEIGHT_LOW) - 1));
        }
    }
    return largest / BN_WEIGHT_MOST;
}

static void qk_f16(const bn_qk *a) {
    qk(a, sizeof(uint16_t), load_f16);
}

static void pv_f16(const bn_pv *a) {
    pv(a, sizeof(uint16_t), load_f16);
}

static void qk_f32(const bn_qk *a) {
    qk(a, sizeof(float), load_f32);
}

static void pv_f32(const bn_pv *a) {
    pv(a, sizeof(float), load_f32);
}

#endif
