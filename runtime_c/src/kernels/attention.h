/* SPDX-License-Identifier: MIT
 *
 * attention.h: attention scores (queries times keys) and outputs (weights times values) on the
 * layout of the KV cache: one set of kernels for each cache type (kv.h).
 */
#ifndef BITNET_KERNELS_ATTENTION_H
#define BITNET_KERNELS_ATTENTION_H

#include "bitnet_runtime.h" /* bn_kv_type */
#include "shapes.h"

/* scores[i * score_stride + 16 t + j] = q_i · key(16 t + j). n_q, tiles >= 1; head_dim any.
 *
 * BN_KV_F16, BN_KV_F32: s = +0; s = fma(key[d], q[d], s) for d in order. K tiles are laid out
 * [tile][head_dim][16 keys], so that keys are lanes; they are 32-byte (f16) or 64-byte (f32)
 * aligned.
 *
 * BN_KV_INT8: codes in -127..127 stand for code · scale, with one scale per query and per key:
 * (float)(sum of q·k, exact) * (q_scale[i] * scale of the key). A K tile is laid out
 * [ceil(head_dim / 4)][16 keys][4], followed by the float scales of the 16 keys; 64-byte aligned.
 * head_dim <= BN_MAX_HEAD, so that the conversion to float is exact.
 *
 * BN_KV_K4V8: query codes as for BN_KV_INT8; key codes in 0..15 stand for (2 code - 15) · scale,
 * with one scale per 32 dimensions. s = +0; s = fma((float)(sum of q·(2 k - 15), exact), scale, s)
 * for each group of 32 dimensions in order, padded with empty groups to an even number; the score
 * is s * q_scale[i]. A K tile consists of blocks of 64 dimensions, the last of which may be
 * shorter: [ceil(dimensions / 8)][16 keys][4], where byte j of word w holds dimension 8 w + j in
 * its low nibble and 8 w + 4 + j in its high nibble; then [16 keys][2], the scales as bfloat16
 * (upper halves of floats). */
typedef struct bn_qk {
    float *scores;
    size_t score_stride;  /* in floats */
    const float *q;       /* [n_q][head_dim], for float keys */
    const int8_t *codes;  /* for quantized keys: [n_q][bn_q_row(head_dim)], zero past head_dim */
    const float *q_scale; /* with codes: [n_q] */
    size_t n_q;
    const void *k;
    size_t head_dim, tiles;
    size_t ahead; /* byte distance from these keys to those to prefetch */
} bn_qk;

/* Adds to `out` or `sums`, which the caller clears first; the keys may be split anywhere.
 *
 * BN_KV_F16, BN_KV_F32: out[i * head_dim + d] = fma(p[i * p_stride + t], v[t * head_dim + d],
 * out[...]) for t = 0, 1, ... keys - 1 in this order.
 *
 * BN_KV_INT8, BN_KV_K4V8: sums[i * head_dim + d] += sum of weight(i, t) · v(t, d), with the codes
 * of bn_weigh as weights. Values are laid out [keys / 4][head_dim][4 keys]; keys is a multiple of
 * 16 and at most 1024, so that sums are exact. */
typedef struct bn_pv {
    float *out;     /* for float values: [n_q][head_dim] */
    const float *p; /* [n_q][p_stride] */
    int32_t *sums;  /* for quantized values: sums instead of out, codes instead of p */
    const uint8_t *codes;
    size_t p_stride, n_q; /* p_stride: in elements of p or codes */
    const void *v;
    size_t head_dim, keys;
    size_t ahead; /* as in bn_qk */
} bn_pv;

/* Quantizes the attention weights of a query, multiplied by the scales of the values: x[t] = w[t] *
 * scale[t], both >= 0 or NaN, for t in [low, high), and 0 for the rest of the n keys, a multiple of
 * 16. m = max(x, 1e-30), s = 16383 / m; round_half_even(x · s) = 128 h + l with h, l <= 127, so
 * that the products of every tier are exact in 16 bits. Every 16 keys take 16 bytes of h, then 16
 * of l. Returns 1/s as m / 16383, NaN if any x is; the codes are then arbitrary but in range.
 * Overwrites w; codes may alias w. */
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
