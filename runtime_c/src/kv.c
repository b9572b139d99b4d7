/* SPDX-License-Identifier: MIT
 *
 * kv.c: see kv.h.
 */
#include "kv.h"

static float encode_f16(const bn_kernels *kernels, void *to, const float *x, size_t n) {
    kernels->bytes.f32_to_f16(to, x, n);
    return 1;
}

static float encode_int8(const bn_kernels *kernels, void *to, const float *x, size_t n) {
    int32_t sum;
    return 1 / kernels->vectors.quantize(to, &sum, x, n, bn_q_row(n));
}

const bn_kv bn_kv_types[BN_KV_TYPES] = {
    [BN_KV_F16] = {.name = "f16", .bits = 16, .together = 1, .encode = encode_f16},
    [BN_KV_F32] = {.name = "f32", .bits = 32, .together = 1},
    [BN_KV_INT8] = {.name = "int8",
                    .bits = 8,
                    .together = 4,
                    .scaled = 1,
                    .encode = encode_int8,
                    .encode_query = encode_int8},
};

const char *bn_kv_name(int32_t type) {
    return type >= 0 && type < BN_KV_TYPES ? bn_kv_types[type].name : NULL;
}
