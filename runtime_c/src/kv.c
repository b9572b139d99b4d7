/* SPDX-License-Identifier: MIT
 *
 * kv.c: see kv.h.
 */
#include "kv.h"

#include <math.h>
#include <string.h>

#include "linear/values.h"

static uint8_t *row_of(const bn_quantizing *a, size_t row) {
    return (uint8_t *)a->q + row * a->q_stride;
}

/* A half is never infinite, so without the NaN an overflow would become an ordinary number. */
static void to_f16(const bn_kernels *kernels, const bn_quantizing *a) {
    const uint16_t nan = 0x7E00;
    for (size_t row = 0; row < a->rows; row++) {
        const float *x = a->x + row * a->x_stride;
        uint16_t *y = (uint16_t *)(void *)row_of(a, row);
        kernels->bytes.f32_to_f16(y, x, a->n);
        if (bn_has_not_finite_f32((const uint8_t *)x, a->n * sizeof *x))
            y[0] = nan;
    }
}

static void to_int8(const bn_kernels *kernels, const bn_quantizing *a) {
    kernels->vectors.quantize(a);
    for (size_t row = 0; row < a->rows; row++)
        a->s[row] = 1 / a->s[row];
}

static void key_int8(const bn_kernels *kernels, const bn_quantizing *a) {
    to_int8(kernels, a);
    for (size_t row = 0; row < a->rows; row++)
        memcpy(row_of(a, row) + bn_round_up(a->n, 4), a->s + row, sizeof *a->s);
}

/* --- k4v8 --- */

/* Rotate x by a block-diagonal matrix of Hadamard matrices whose size, which is returned, is the
 * largest power of two that divides n. Outliers in one dimension are spread over all. Each pass
 * stores the sums and differences of the two halves interleaved: the order does not matter, as keys
 * and queries share it. */
static size_t turn(float *y, const float *x, size_t n) {
    const size_t size = n & (~n + 1), half = size / 2;
    float last[BN_MAX_HEAD];
    memcpy(y, x, n * sizeof *x);
    for (size_t at = 0; at < n; at += size, y += size)
        for (size_t pass = 1; pass < size; pass *= 2) {
            memcpy(last, y, size * sizeof *y);
            for (size_t i = 0; i < half; i++) {
                y[2 * i] = last[i] + last[half + i];
                y[2 * i + 1] = last[i] - last[half + i];
            }
        }
    return size;
}

/* Round x to a float whose lower 16 bits are 0; x is not NaN. */
static float upper_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Encode n floats as codes 0..15, which stand for (2 code - 15) · scale. Returns the scale, NaN if
 * an x is not finite, so that this is detected. */
static float nibbles(uint8_t *codes, const float *x, size_t n) {
    float most = 0;
    for (size_t i = 0; i < n; i++)
        most = fabsf(x[i]) > most || isnan(x[i]) ? fabsf(x[i]) : most;
    const float scale = isfinite(most) ? upper_half(most / 15) : NAN;
    const float s = scale > 0 ? 0.5f / scale : 0;
    for (size_t i = 0; i < n; i++) {
        float code = x[i] * s + 8;  /* truncation gives the nearest code */
        code = code > 0 ? code : 0; /* NaN, too */
        codes[i] = (uint8_t)(code < 15 ? code : 15);
    }
    return scale;
}

/* Encode at most 64 dimensions: their words, then the word with both scales. Returns the end. */
static uint8_t *nibble_words(uint8_t *words, const float *x, size_t n) {
    enum { GROUP = BN_NIBBLE_GROUP };
    uint8_t codes[2 * GROUP] = {0};
    const size_t low = bn_min(n, GROUP);
    const float scales[] = {nibbles(codes, x, low), nibbles(codes + low, x + low, n - low)};
    uint32_t bits[2];
    for (size_t d = 0; d < n; d += 8, words += 4)
        for (size_t j = 0; j < 4; j++)
            words[j] = (uint8_t)(codes[d + j] | codes[d + 4 + j] << 4);
    memcpy(bits, scales, sizeof bits);
    bits[0] = bits[0] >> 16 | bits[1];
    memcpy(words, bits, sizeof *bits);
    return words + sizeof *bits;
}

static void key_k4v8(const bn_kernels *kernels, const bn_quantizing *a) {
    enum { BLOCK = 2 * BN_NIBBLE_GROUP };
    float turned[BN_MAX_HEAD];
    (void)kernels;
    for (size_t row = 0; row < a->rows; row++) {
        uint8_t *words = row_of(a, row);
        turn(turned, a->x + row * a->x_stride, a->n);
        for (size_t d = 0; d < a->n; d += BLOCK)
            words = nibble_words(words, turned + d, bn_min(a->n - d, BLOCK));
    }
}

/* Products of rotated keys and queries are too large by the factor that `turn` returns, a power of
 * two. */
static void query_k4v8(const bn_kernels *kernels, const bn_quantizing *a) {
    float turned[BN_MAX_HEAD];
    for (size_t row = 0; row < a->rows; row++) {
        const size_t times = turn(turned, a->x + row * a->x_stride, a->n);
        to_int8(kernels, &(bn_quantizing){.q = (int8_t *)row_of(a, row),
                                          .s = a->s + row,
                                          .sums = a->sums + row,
                                          .x = turned,
                                          .n = a->n,
                                          .rows = 1});
        a->s[row] /= (float)times;
    }
}

const bn_kv bn_kv_types[BN_KV_TYPES] = {
    [BN_KV_F16] = {.name = "f16",
                   .word = 2,
                   .dims = 1,
                   .value = 2,
                   .of_images = BN_KV_F32,
                   .encode_key = to_f16,
                   .encode_value = to_f16},
    [BN_KV_F32] = {.name = "f32", .word = 4, .dims = 1, .value = 4, .of_images = BN_KV_F32},
    [BN_KV_INT8] = {.name = "int8",
                    .word = 4,
                    .dims = 4,
                    .scaled = BN_MAX_HEAD,
                    .value = 1,
                    .value_scaled = 1,
                    .of_images = BN_KV_INT8,
                    .encode_key = key_int8,
                    .encode_value = to_int8,
                    .encode_query = to_int8},
    [BN_KV_K4V8] = {.name = "k4v8",
                    .word = 4,
                    .dims = 8,
                    .scaled = 2 * BN_NIBBLE_GROUP,
                    .value = 1,
                    .value_scaled = 1,
                    .of_images = BN_KV_INT8,
                    .encode_key = key_k4v8,
                    .encode_value = to_int8,
                    .encode_query = query_k4v8},
};

/* A scale that is NaN is detected where it is used. */
bn_status bn_kv_check(const bn_kv *kv, const uint8_t *bytes, size_t head_dim) {
    const int key_codes = kv->dims == kv->word; /* a byte for each dimension, then the scale */
    const uint8_t *value = bytes + bn_kv_key(kv, head_dim);
    float scale;
    if (!kv->value_scaled)
        return BN_OK;
    if ((key_codes && bn_has_int8_least(bytes, bn_kv_key(kv, head_dim) - sizeof scale)) ||
        bn_has_int8_least(value, bn_kv_value(kv, head_dim)))
        return BN_ERR_CODE;
    memcpy(&scale, value + bn_kv_value(kv, head_dim), sizeof scale);
    return signbit(scale) && !isnan(scale) ? BN_ERR_SCALE : BN_OK;
}

const char *bn_kv_name(int32_t type) {
    return type >= 0 && type < BN_KV_TYPES ? bn_kv_types[type].name : NULL;
}
