/* SPDX-License-Identifier: MIT
 *
 * attention.c: see attention.h.
 */
#include <string.h>

#include "scalar.h"

static float widen_f32(const void *x, size_t i) {
    return ((const float *)x)[i];
}

static float widen_f16(const void *x, size_t i) {
    return half_to_float(((const uint16_t *)x)[i]);
}

typedef float widen_fn(const void *x, size_t i);

static void qk(const bn_qk *a, widen_fn *widen) {
    const size_t E = a->head_dim;
    for (size_t i = 0; i < a->n_q; i++)
        for (size_t key = 0; key < a->tiles * BN_LANES; key++) {
            const size_t column = key / BN_LANES * E * BN_LANES + key % BN_LANES;
            float sum = 0;
            for (size_t d = 0; d < E; d++)
                sum = fmaf(widen(a->k, column + d * BN_LANES), a->q[i * E + d], sum);
            a->scores[i * a->score_stride + key] = sum;
        }
}

static void pv(const bn_pv *a, widen_fn *widen) {
    const size_t E = a->head_dim;
    for (size_t i = 0; i < a->n_q; i++)
        for (size_t t = 0; t < a->keys; t++)
            for (size_t d = 0; d < E; d++)
                a->out[i * E + d] =
                    fmaf(a->p[i * a->p_stride + t], widen(a->v, t * E + d), a->out[i * E + d]);
}

static void qk_f32(const bn_qk *a) {
    qk(a, widen_f32);
}

static void pv_f32(const bn_pv *a) {
    pv(a, widen_f32);
}

static void qk_f16(const bn_qk *a) {
    qk(a, widen_f16);
}

static void pv_f16(const bn_pv *a) {
    pv(a, widen_f16);
}

static void qk_int8(const bn_qk *a) {
    const size_t E = a->head_dim, words = (E + 3) / 4, q_stride = bn_q_row(E);
    const size_t tile = (words + 1) * BN_LANES * 4;
    for (size_t i = 0; i < a->n_q; i++)
        for (size_t key = 0; key < a->tiles * BN_LANES; key++) {
            const int8_t *word = (const int8_t *)a->k + key / BN_LANES * tile + key % BN_LANES * 4;
            float scale;
            memcpy(&scale, word + words * BN_LANES * 4, sizeof scale);
            int32_t sum = 0;
            for (size_t d = 0; d < E; d++)
                sum += word[d / 4 * BN_LANES * 4 + d % 4] * a->codes[i * q_stride + d];
            a->scores[i * a->score_stride + key] = (float)sum * (a->q_scale[i] * scale);
        }
}

/* Weights of 16 keys take 32 bytes: 16 upper parts, then 16 lower ones. */
static int32_t weight(const uint8_t *codes, size_t t) {
    const uint8_t *h = codes + t / BN_LANES * 2 * BN_LANES + t % BN_LANES;
    return h[0] << BN_WEIGHT_LOW | h[BN_LANES];
}

static void pv_int8(const bn_pv *a) {
    const size_t E = a->head_dim;
    const int8_t *v = a->v;
    for (size_t i = 0; i < a->n_q; i++)
        for (size_t t = 0; t < a->keys; t++)
            for (size_t d = 0; d < E; d++)
                a->sums[i * E + d] +=
                    weight(a->codes + i * a->p_stride, t) * v[(t / 4 * E + d) * 4 + t % 4];
}

static float weigh(uint8_t *codes, float *w, const float *scale, size_t low, size_t high,
                   size_t n) {
    float largest = BN_WEIGHT_LEAST;
    for (size_t t = 0; t < n; t++) {
        w[t] = t >= low && t < high ? w[t] * scale[t] : 0;
        largest = w[t] > largest || isnan(w[t]) ? w[t] : largest;
    }
    const float s = BN_WEIGHT_MOST / largest;
    for (size_t t = 0; t < n; t += BN_LANES) {
        uint8_t both[2 * BN_LANES];
        for (size_t j = 0; j < BN_LANES; j++) {
            const float x = w[t + j] * s;
            const int32_t code = (int32_t)rintf(x > 0 ? x : 0); /* NaN becomes 0 */
            both[j] = (uint8_t)(code >> BN_WEIGHT_LOW);
            both[BN_LANES + j] = (uint8_t)(code & ((1 << BN_WEIGHT_LOW) - 1));
        }
        memcpy(codes + 2 * t, both, sizeof both);
    }
    return largest / BN_WEIGHT_MOST;
}

/* One of the two bfloat16 scales in a 32-bit word. */
static float upper_half(const uint8_t *word, int which) {
    uint32_t bits;
    float f;
    memcpy(&bits, word, sizeof bits);
    bits = which ? bits & 0xffff0000u : bits << 16;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Exact dot product over one group of `dims` <= 32 dimensions. */
static int32_t nibble_sum(const uint8_t *k, const int8_t *q, size_t dims) {
    int32_t sum = 0;
    for (size_t d = 0; d < dims; d++) {
        const int byte = k[d / 8 * BN_LANES * 4 + d % 4];
        sum += (2 * (d % 8 < 4 ? byte & 15 : byte >> 4) - 15) * q[d];
    }
    return sum;
}

static void qk_k4v8(const bn_qk *a) {
    enum { GROUP = BN_NIBBLE_GROUP, WORD = BN_LANES * 4 };
    const size_t E = a->head_dim, q_stride = bn_q_row(E);
    const size_t tile = bn_nibble_words(E) * WORD;
    for (size_t i = 0; i < a->n_q; i++)
        for (size_t key = 0; key < a->tiles * BN_LANES; key++) {
            const int8_t *q = a->codes + i * q_stride;
            const uint8_t *k = (const uint8_t *)a->k + key / BN_LANES * tile + key % BN_LANES * 4;
            float s = 0;
            for (size_t d = 0; d < E; d += 2 * GROUP) {
                const size_t dims = E - d < 2 * GROUP ? E - d : 2 * GROUP;
                const size_t low = dims < GROUP ? dims : GROUP;
                const uint8_t *scales = k + (dims + 7) / 8 * WORD;
                s = fmaf((float)nibble_sum(k, q + d, low), upper_half(scales, 0), s);
                s = fmaf((float)nibble_sum(k + 4 * WORD, q + d + GROUP, dims - low),
                         upper_half(scales, 1), s);
                k = scales + WORD;
            }
            a->scores[i * a->score_stride + key] = s * a->q_scale[i];
        }
}

const bn_attention_kernels bn_scalar_attention[BN_KV_TYPES] = {
    [BN_KV_F16] = {qk_f16, pv_f16, NULL},
    [BN_KV_F32] = {qk_f32, pv_f32, NULL},
    [BN_KV_INT8] = {qk_int8, pv_int8, weigh},
    [BN_KV_K4V8] = {qk_k4v8, pv_int8, weigh},
};
