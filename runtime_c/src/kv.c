/* SPDX-License-Identifier: MIT
 *
 * kv.c: see kv.h.
 */
#include "kv.h"

#include <string.h>

static void key_f16(const bn_kernels *kernels, void *to, const float *x, size_t n) {
    kernels->bytes.f32_to_f16(to, x, n);
}

static float value_f16(const bn_kernels *kernels, void *to, const float *x, size_t n) {
    key_f16(kernels, to, x, n);
    return 1;
}

static float value_int8(const bn_kernels *kernels, void *to, const float *x, size_t n) {
    int32_t sum;
    return 1 / kernels->vectors.quantize(to, &sum, x, n, bn_q_row(n));
}

static void key_int8(const bn_kernels *kernels, void *to, const float *x, size_t n) {
    const float scale = value_int8(kernels, to, x, n);
    memcpy((uint8_t *)to + (n + 3) / 4 * 4, &scale, sizeof scale);
}

const bn_kv bn_kv_types[BN_KV_TYPES] = {
    [BN_KV_F16] = {.name = "f16",
                   .word = 2,
                   .dims = 1,
                   .value = 2,
                   .encode_key = key_f16,
                   .encode_value = value_f16},
    [BN_KV_F32] = {.name = "f32", .word = 4, .dims = 1, .value = 4},
    [BN_KV_INT8] = {.name = "int8",
                    .word = 4,
                    .dims = 4,
                    .scaled = BN_MAX_HEAD,
                    .value = 1,
                    .value_scaled = 1,
                    .encode_key = key_int8,
                    .encode_value = value_int8,
                    .encode_query = value_int8},
};

const char *bn_kv_name(int32_t type) {
    return type >= 0 && type < BN_KV_TYPES ? bn_kv_types[type].name : NULL;
}
