/* SPDX-License-Identifier: MIT
 *
 * attention.h: queries times keys, weights times values, as they lie in the cache: one row of
 * kernels for each type of numbers that the cache holds (kv.h).
 */
#ifndef BITNET_KERNELS_ATTENTION_H
#define BITNET_KERNELS_ATTENTION_H

#include "bitnet_runtime.h" /* bn_kv_type */
#include "shapes.h"

/* scores[i * score_stride + 16 t + j] = q_i · key(16 t + j). n_q, tiles >= 1; head_dim any.
 *
 * BN_KV_F16, BN_KV_F32: s = +0; s = fma(key[d], q[d], s) for d in order. K tiles lie
 * [tile][head_dim][16 keys], so keys are lanes; they are 32-byte (f16) / 64-byte aligned.
 *
 * BN_KV_INT8: codes in -127..127 that stand for code · scale, one scale a query and key:
 * (float)(sum of q·k, exact) * (q_scale[i] * scale of the key). K tiles lie
 * [tile][ceil(head_dim / 4)][16 keys][4] and behind these a float for each of the 16, 64-byte
 * aligned; head_dim <= BN_MAX_HEAD, so that the float is exact. */
typedef struct bn_qk {
    float *scores;
    size_t score_stride;  /* in floats */
    const float *q;       /* [n_q][head_dim], of types whose keys are floats */
    const int8_t *codes;  /* of others, [n_q][bn_q_row(head_dim)], zero past head_dim */
    const float *q_scale; /* and [n_q] */
    size_t n_q;
    const void *k;
    size_t head_dim, tiles;
} bn_qk;

/* out[i * head_dim + d] = fma(p[i * p_stride + t], v[t * head_dim + d], out[...]) for t = 0, 1,
 * ... keys - 1 in this order: the caller clears out, and may cut the keys anywhere. Scales of
 * values are left to p. */
typedef struct bn_pv {
    float *out;
    const float *p;
    size_t p_stride, n_q;
    const void *v; /* [keys][head_dim] */
    size_t head_dim, keys;
} bn_pv;

typedef struct bn_attention_kernels {
    void (*qk)(const bn_qk *a);
    void (*pv)(const bn_pv *a);
} bn_attention_kernels;

#endif
