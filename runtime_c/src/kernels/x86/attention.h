/* SPDX-License-Identifier: MIT
 *
 * attention.h: scores and weighted values, the same for every x86 tier. Keys, or the elements of
 * a value, are lanes; QUERIES of them (2 or 4) share each register that is loaded and widened.
 */
#ifndef BITNET_X86_ATTENTION_H
#define BITNET_X86_ATTENTION_H

#include "exponential.h"
#include "scale.h"

/* X for each of four chains or vectors, of each query. */
#define EACH_FOUR(X, i) X(i, 0) X(i, 1) X(i, 2) X(i, 3)
#define EACH_QUERY(X) EACH_FOUR(X, 0) EACH_FOUR(X, 1) EACH_FOUR(X, 2) EACH_FOUR(X, 3)

/* For Q queries and the keys in one register: the four sums j, j+8, j+4, j+12 of the float rule
 * and the part of its tree above them, (s[j] + s[j+8]) + (s[j+4] + s[j+12]). */
INLINE void qk_lanes(vec *total, const float *q, const uint8_t *k, size_t size, size_t keys,
                     size_t head_dim, size_t j, int fetch, load_fn *load, const int Q) {
    vec sum[4][4];
#define CLEAR(i, c) sum[i][c] = vec_zero();
    EACH_QUERY(CLEAR)
#undef CLEAR

    size_t d = j;
#define LANE(c) ((c & 1) * 8 + (c & 2) * 2)
#define LOAD(i, c) const vec key##c = load(k, (d + LANE(c)) * BN_LANES + keys);
#define TERM(i, c)                                                                                 \
    if (i < Q)                                                                                     \
        sum[i][c] = vec_fma(key##c, vec_set(q[i * head_dim + d + LANE(c)]), sum[i][c]);
    for (; d - j + BN_LANES <= head_dim; d += BN_LANES) {
        for (size_t line = 0; fetch && line < size; line++) /* a quarter of these dimensions */
            prefetch_cache(k + (d - j + 4 * j) * BN_LANES * size + line * 64);
        EACH_FOUR(LOAD, 0)
        EACH_QUERY(TERM)
    }
    if (d - j < head_dim) { /* what is missing from the last round counts as 0·0 */
#undef LOAD
#undef TERM
#define TERM(i, c)                                                                                 \
    if (i < Q)                                                                                     \
        sum[i][c] = d + LANE(c) < head_dim                                                         \
                        ? vec_fma(load(k, (d + LANE(c)) * BN_LANES + keys),                        \
                                  vec_set(q[i * head_dim + d + LANE(c)]), sum[i][c])               \
                        : vec_add(sum[i][c], vec_zero());
        EACH_QUERY(TERM)
#undef TERM
    }
    for (int i = 0; i < Q; i++)
        total[i] = vec_add(vec_add(sum[i][0], sum[i][1]), vec_add(sum[i][2], sum[i][3]));
}

/* One tile. fetch: its lines farther on are not on their way yet. */
INLINE void qk_queries(float *scores, size_t score_stride, const float *q, const uint8_t *k,
                       size_t size, size_t head_dim, int fetch, load_fn *load, const int Q) {
    for (size_t keys = 0; keys < BN_LANES; keys += LANES) {
        vec b[4][QUERIES];
        for (size_t j = 0; j < 4; j++)
            qk_lanes(b[j], q, k, size, keys, head_dim, j, fetch, load, Q);
        for (int i = 0; i < Q; i++)
            vec_store(scores + (size_t)i * score_stride + keys,
                      vec_add(vec_add(b[0][i], b[2][i]), vec_add(b[1][i], b[3][i])));
    }
}

/* out[i][0..4 registers or 1] += p[i][t] * v[t], t = 0, 1, ... */
INLINE void pv_block(float *out, size_t out_stride, const float *p, size_t p_stride,
                     const uint8_t *v, size_t size, size_t head_dim, size_t keys, int fetch,
                     load_fn *load, const int Q, const int V) {
    vec sum[4][4];
#define LOAD(i, c)                                                                                 \
    if (i < Q && c < V)                                                                            \
        sum[i][c] = vec_load(out + i * out_stride + c * LANES);
    EACH_QUERY(LOAD)
#undef LOAD
    for (size_t t = 0; t < keys; t++, v += head_dim * size) {
        vec value[4];
        for (size_t line = 0; fetch && line < (size_t)V * LANES * size; line += 64)
            prefetch_cache(v + line);
#define LOAD(i, c)                                                                                 \
    if (c < V)                                                                                     \
        value[c] = load(v, c * LANES);
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
        vec_store(out + i * out_stride + c * LANES, sum[i][c]);
    EACH_QUERY(STORE)
#undef STORE
}

/* The last register of a row reaches back into the one before it: what both have gets the same sum
 * twice, from what was there before either. */
INLINE void pv_last(float (*last)[LANES], float *out, const float *p, size_t p_stride,
                    const uint8_t *v, size_t size, size_t head_dim, size_t keys, load_fn *load,
                    const int Q) {
    for (int i = 0; i < Q; i++)
        memcpy(last[i], out + (size_t)i * head_dim, sizeof last[i]);
    pv_block(last[0], LANES, p, p_stride, v, size, head_dim, keys, 0, load, Q, 1);
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

INLINE void pv_keys(float *out, const float *p, size_t p_stride, const uint8_t *v, size_t size,
                    size_t head_dim, size_t keys, int fetch, load_fn *load, const int Q) {
    const size_t end = head_dim - LANES; /* the last register, if there is one */
    const int ragged = head_dim > LANES && head_dim % LANES != 0;
    float last[4][LANES] = {{0}};
    size_t d = 0;
    if (ragged)
        pv_last(last, out + end, p, p_stride, v + end * size, size, head_dim, keys, load, Q);
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES)
        pv_block(out + d, head_dim, p, p_stride, v + d * size, size, head_dim, keys, fetch, load, Q,
                 4);
    for (; d + LANES <= head_dim; d += LANES)
        pv_block(out + d, head_dim, p, p_stride, v + d * size, size, head_dim, keys, fetch, load, Q,
                 1);
    for (int i = 0; i < Q && ragged; i++)
        memcpy(out + (size_t)i * head_dim + end, last[i], sizeof last[i]);
    for (int i = 0; i < Q && head_dim < LANES; i++)
        pv_tail(out + (size_t)i * head_dim, head_dim, p + (size_t)i * p_stride, v, size, head_dim,
                keys, load);
}

/* The largest of 4, 2, 1 queries that n holds. */
INLINE size_t query_block(size_t n) {
    return n >= 4 && QUERIES >= 4 ? 4 : n >= 2 ? 2 : 1;
}

/* A tile of keys, or some values, stay in the first cache for all queries. */
INLINE void qk(const bn_qk *all, size_t size, load_fn *load) {
    const bn_qk a = *all; /* in registers: no store can change it */
    const size_t E = a.head_dim, stride = a.score_stride;
    for (size_t t = 0; t < a.tiles; t++) {
        const uint8_t *k = (const uint8_t *)a.k + t * E * BN_LANES * size;
        for (size_t i = 0, block; i < a.n_q; i += block) {
            float *s = a.scores + i * stride + t * BN_LANES;
            const float *q = a.q + i * E;
            switch (block = query_block(a.n_q - i)) {
            case 4:
                qk_queries(s, stride, q, k, size, E, i == 0, load, QUERIES);
                break;
            case 2:
                qk_queries(s, stride, q, k, size, E, i == 0, load, 2);
                break;
            default:
                qk_queries(s, stride, q, k, size, E, i == 0, load, 1);
            }
        }
    }
}

INLINE void pv(const bn_pv *all, size_t size, load_fn *load) {
    enum { KEYS = 32 };
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
