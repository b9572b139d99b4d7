/* SPDX-License-Identifier: MIT
 *
 * attention.h: scores and weighted values, the same for every x86 tier. Keys, or the elements of
 * a value, are lanes; QUERIES of them (2 or 4) share each register that is loaded and widened. As
 * two loads and two products go through in a cycle, two registers of keys share what is loaded of
 * the queries: 12 loads for 16 products, where with one there are 20.
 */
#ifndef BITNET_X86_ATTENTION_H
#define BITNET_X86_ATTENTION_H

#include "exponential.h"
#include "scale.h"

/* X for each of four chains or vectors, of each query. */
#define EACH_FOUR(X, i) X(i, 0) X(i, 1) X(i, 2) X(i, 3)
#define EACH_QUERY(X) EACH_FOUR(X, 0) EACH_FOUR(X, 1) EACH_FOUR(X, 2) EACH_FOUR(X, 3)

/* X for each chain of a query and a register of keys. */
#define EACH_CHAIN(X, i, r) X(i, r, 0) X(i, r, 1) X(i, r, 2) X(i, r, 3)
#define EACH_KEYS(X, i) EACH_CHAIN(X, i, 0) EACH_CHAIN(X, i, 1)
#define EACH_SCORE(X) EACH_KEYS(X, 0) EACH_KEYS(X, 1) EACH_KEYS(X, 2) EACH_KEYS(X, 3)

typedef struct qk_block {
    const float *q;    /* [Q][head_dim] */
    const uint8_t *k;  /* of the keys in the first register */
    size_t size, next; /* bytes of a number; from one register of keys to the next */
    size_t head_dim;
    int fetch; /* its lines farther on are not on their way yet */
} qk_block;

/* For Q queries and the keys in R registers: C of the sums j, j+8, j+4, j+12 of the float rule,
 * and the part of its tree above them, (s[j] + s[j+8]) + (s[j+4] + s[j+12]). */
INLINE void qk_lanes(vec total[4][2], const qk_block *b, size_t j, load_fn *load, const int Q,
                     const int R, const int C) {
    const size_t E = b->head_dim, size = b->size;
    vec sum[4][2][4];
#define CLEAR(i, r, c) sum[i][r][c] = vec_zero();
    EACH_SCORE(CLEAR)
#undef CLEAR

    size_t d = j;
#define LANE(c) ((c & 1) * 8 + (c & 2) * 2)
#define LOAD(i, r, c)                                                                              \
    if (r < R && c < C)                                                                            \
        key[r][c] = load(b->k + r * b->next, (d + LANE(c)) * BN_LANES);
#define TERM(i, r, c)                                                                              \
    if (i < Q && r < R && c < C)                                                                   \
        sum[i][r][c] = vec_fma(key[r][c], vec_set(b->q[i * E + d + LANE(c)]), sum[i][r][c]);
    for (; d - j + BN_LANES <= E; d += BN_LANES) {
        vec key[2][4];
        for (size_t line = 0; b->fetch && line < size * (size_t)C / 4; line++) /* of these */
            prefetch_cache(b->k + (d - j + (size_t)C * j) * BN_LANES * size + line * 64);
        EACH_KEYS(LOAD, 0)
        EACH_SCORE(TERM)
    }
    if (d - j < E) { /* what is missing from the last round counts as 0·0 */
#undef LOAD
#undef TERM
#define TERM(i, r, c)                                                                              \
    if (i < Q && r < R && c < C)                                                                   \
        sum[i][r][c] = d + LANE(c) < E                                                             \
                           ? vec_fma(load(b->k + r * b->next, (d + LANE(c)) * BN_LANES),           \
                                     vec_set(b->q[i * E + d + LANE(c)]), sum[i][r][c])             \
                           : vec_add(sum[i][r][c], vec_zero());
        EACH_SCORE(TERM)
#undef TERM
    }
    for (int i = 0; i < Q; i++)
        for (int r = 0; r < R; r++) {
            const vec *s = sum[i][r];
            total[i][r] = vec_add(s[0], s[1]);
            if (C == 4)
                total[i][r] = vec_add(total[i][r], vec_add(s[2], s[3]));
        }
}
#undef LANE

/* Scores with the keys in R registers: next scores apart. C: of Q queries, as many as there are
 * registers for. */
INLINE void qk_queries(float *scores, size_t score_stride, const qk_block *b, load_fn *load,
                       const int Q, const int R, const int C) {
    vec t[8][4][2];
    for (size_t j = 0; j < (size_t)(16 / C); j++)
        qk_lanes(t[j], b, j, load, Q, R, C);
    for (int i = 0; i < Q; i++)
        for (int r = 0; r < R; r++) {
            vec s[4];
            for (int j = 0; j < 4; j++)
                s[j] = C == 4 ? t[j][i][r] : vec_add(t[j][i][r], t[j + 4][i][r]);
            vec_store(scores + (size_t)i * score_stride + r * LANES,
                      vec_add(vec_add(s[0], s[2]), vec_add(s[1], s[3])));
        }
}

/* out[i][V registers] += p[i][t] * v[t], t = 0, 1, ... The last register begins at `last`, as far
 * as that is in the one before it: what both have is added up in both. */
INLINE void pv_block(float *out, const float *p, size_t p_stride, const uint8_t *v, size_t size,
                     size_t head_dim, size_t keys, size_t last, int fetch, load_fn *load,
                     const int Q, const int V) {
    vec sum[4][4];
#define AT(c) (c + 1 < V ? c * LANES : last)
#define LOAD(i, c)                                                                                 \
    if (i < Q && c < V)                                                                            \
        sum[i][c] = vec_load(out + i * head_dim + AT(c));
    EACH_QUERY(LOAD)
#undef LOAD
    for (size_t t = 0; t < keys; t++, v += head_dim * size) {
        vec value[4];
        for (size_t line = 0; fetch && line < (size_t)V * LANES * size; line += 64)
            prefetch_cache(v + line);
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

/* The n < LANES elements of one query that has no more, padded on their way to the registers. */
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

/* Blocks of 1 to 4 registers, as even as can be. */
INLINE void pv_keys(float *out, const float *p, size_t p_stride, const uint8_t *v, size_t size,
                    size_t head_dim, size_t keys, int fetch, load_fn *load, const int Q) {
    const size_t n = (head_dim + LANES - 1) / LANES, blocks = (n + 3) / 4;
    for (int i = 0; i < Q && head_dim < LANES; i++)
        pv_tail(out + (size_t)i * head_dim, head_dim, p + (size_t)i * p_stride, v, size, head_dim,
                keys, load);
    for (size_t b = 0; b < blocks && head_dim >= LANES; b++) {
        const size_t first = n * b / blocks, end = n * (b + 1) / blocks, d = first * LANES;
        const size_t last = (end < n ? end * LANES : head_dim) - LANES - d;
#define BLOCK(V)                                                                                   \
    case V:                                                                                        \
        pv_block(out + d, p, p_stride, v + d * size, size, head_dim, keys, last, fetch, load, Q,   \
                 V);                                                                               \
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

/* The largest of 4, 2, 1 queries that n holds. */
INLINE size_t query_block(size_t n) {
    return n >= 4 && QUERIES >= 4 ? 4 : n >= 2 ? 2 : 1;
}

/* Two registers of keys, or one, with all queries: they stay in the first cache. */
INLINE void qk_keys(const bn_qk *a, size_t key, qk_block b, load_fn *load, const int R) {
    for (size_t i = 0, n; i < a->n_q; i += n) {
        float *s = a->scores + i * a->score_stride + key;
        b.q = a->q + i * b.head_dim;
        b.fetch = i == 0;
        switch (n = query_block(a->n_q - i)) {
        case 4:
            qk_queries(s, a->score_stride, &b, load, QUERIES, R, 2);
            break;
        case 2:
            qk_queries(s, a->score_stride, &b, load, 2, R, QUERIES == 2 ? 2 : 4);
            break;
        default:
            qk_queries(s, a->score_stride, &b, load, 1, R, 4);
        }
    }
}

INLINE void qk(const bn_qk *all, size_t size, load_fn *load) {
    enum { TILES = 2 / PARTS }; /* of two registers */
    const bn_qk a = *all;       /* in registers: no store can change it */
    const size_t tile = a.head_dim * BN_LANES * size, keys = a.tiles * BN_LANES;
    qk_block b = {
        .k = a.k, .size = size, .next = TILES == 1 ? LANES * size : tile, .head_dim = a.head_dim};
    size_t key = 0;
    for (; key + 2 * LANES <= keys; key += 2 * LANES, b.k += TILES * tile)
        qk_keys(&a, key, b, load, 2);
    if (key < keys)
        qk_keys(&a, key, b, load, 1);
}

INLINE void pv(const bn_pv *all, size_t size, load_fn *load) {
    enum { KEYS = 64 };
    const bn_pv a = *all;
    const size_t E = a.head_dim, stride = a.p_stride;
    for (size_t t = 0; t < a.keys; t += KEYS) {
        const size_t keys = min_size(a.keys - t, KEYS);
        const uint8_t *v = (const uint8_t *)a.v + t * E * size;
        for (size_t i = 0, block; i < a.n_q; i += block) {
            float *o = a.out + i * E;
            const float *p = a.p + i * stride + t;
            switch (block = query_block(a.n_q - i)) {
            case 4:
                pv_keys(o, p, stride, v, size, E, keys, i == 0, load, QUERIES);
                break;
            case 2:
                pv_keys(o, p, stride, v, size, E, keys, i == 0, load, 2);
                break;
            default:
                pv_keys(o, p, stride, v, size, E, keys, i == 0, load, 1);
            }
        }
    }
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

static void pv_int8(const bn_pv *a) {
    pv(a, sizeof(int8_t), load_int8);
}

/* Keys of int8 come from int8_cache.h. */
static void set_float_kernels(bn_kernels *table) {
    table->products.f32_matmul = f32_matmul;
    table->products.f16_matmul = f16_matmul;
    table->products.f16_add_rows = f16_add_rows;
    table->vectors = (bn_vector_kernels){.scale_sums = scale_sums,
                                         .add = add_to,
                                         .quantize = quantize,
                                         .rms_norm = rms_norm,
                                         .layer_norm = layer_norm,
                                         .max = max_of,
                                         .reaching = reaching,
                                         .exp_sum = exp_sum,
                                         .silu_gate = silu_gate,
                                         .relu2_gate = relu2_gate,
                                         .gelu_gate = gelu_gate,
                                         .relu_gate = relu_gate,
                                         .gelu_erf_gate = gelu_erf_gate};
    table->attention[BN_KV_F16] = (bn_attention_kernels){qk_f16, pv_f16};
    table->attention[BN_KV_F32] = (bn_attention_kernels){qk_f32, pv_f32};
    table->attention[BN_KV_INT8].pv = pv_int8;
    table->bytes.f32_to_f16 = f32_to_f16;
    table->bytes.f16_to_f32 = f16_to_f32;
}

#endif
