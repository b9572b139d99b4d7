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
 * aligned; head_dim <= BN_MAX_HEAD, so that the float is exact.
 *
 * BN_KV_K4V8: codes as above of queries; of keys 0..15, which stand for (2 code - 15) · scale, with
 * a scale every 32 dimensions. s = +0; s = fma((float)(sum of q·(2 k - 15), exact), scale, s) for
 * these 32 by 32, an even number of times; s * q_scale[i]. K tiles lie in blocks of 64 dimensions,
 * the last one short: [ceil(dimensions / 8)][16 keys][4], byte j of word w has dimension 8 w + j in
 * its low half and 8 w + 4 + j in its high half; behind these [16 keys][2], the scales as upper
 * halves of floats. */
typedef struct bn_qk {
    float *scores;
    size_t score_stride;  /* in floats */
    const float *q;       /* [n_q][head_dim], of types whose keys are floats */
    const int8_t *codes;  /* of others, [n_q][bn_q_row(head_dim)], zero past head_dim */
    const float *q_scale; /* and [n_q] */
    size_t n_q;
    const void *k;
    size_t head_dim, tiles;
    size_t ahead; /* bytes from these keys to the next ones, which memory is asked for meanwhile */
} bn_qk;

/* The caller clears out, and may cut the keys anywhere.
 *
 * BN_KV_F16, BN_KV_F32: out[i * head_dim + d] = fma(p[i * p_stride + t], v[t * head_dim + d],
 * out[...]) for t = 0, 1, ... keys - 1 in this order.
 *
 * BN_KV_INT8, BN_KV_K4V8: sums[i * head_dim + d] += sum of weight(i, t) · v(t, d), of codes as
 * bn_weigh leaves them. Values lie [keys / 4][head_dim][4 keys]; keys is a multiple of 16, and
 * there are so few that sums are exact: at most 1024. */
typedef struct bn_pv {
    float *out;     /* of types whose values are floats, [n_q][head_dim] */
    const float *p; /* [n_q][p_stride] */
    int32_t *sums;  /* of others, as out and p */
    const uint8_t *codes;
    size_t p_stride, n_q; /* p_stride: in what p or codes points to */
    const void *v;
    size_t head_dim, keys;
    size_t ahead; /* as in bn_qk */
} bn_pv;

/* Weights of a query, times the scales of values, to integers: x = w[t] * scale[t], both >= 0 or
 * NaN, for t in [low, high), and 0 for all others of n, a multiple of 16; s = 16383 / max(x,
 * 1e-30); round_half_even(x · s) is 128 h + l, h and l at most 127: so the products of every tier
 * are exact in 16 bits. For each 16 keys there are 16 bytes of h, then 16 of l. Returns 1/s as max
 * / 16383, which is NaN where an x is; codes then have some value in their range. Changes w; codes
 * may lie where w does. */
typedef float bn_weigh(uint8_t *codes, float *w, const float *scale, size_t low, size_t high,
                       size_t n);

enum { BN_WEIGHT_LOW = 7 /* bits of l */ };
#define BN_WEIGHT_MOST 16383.0f
#define BN_WEIGHT_LEAST 1e-30f

typedef struct bn_attention_kernels {
    void (*qk)(const bn_qk *a);
    void (*pv)(const bn_pv *a);
    bn_weigh *weigh; /* NULL: weights stay floats */
} bn_attention_kernels;

#endif
