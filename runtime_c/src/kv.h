/* SPDX-License-Identifier: MIT
 *
 * kv.h: the element types of a KV cache, one table row each: sizes of a key and a value, and their
 * encoders. The kernels that read them are in kernels/attention.h, also one row per type. No other
 * code depends on the type of a cache.
 */
#ifndef BITNET_KV_H
#define BITNET_KV_H

#include "bitnet_runtime.h"
#include "kernels/kernels.h"

/* Encode rows of floats (keys, values or queries); those of a key become its words, one after the
 * other. Arguments as for quantize, except: s, unless it is among the words of a key, is the factor
 * that codes are multiplied by; a row of q has room for n floats or bn_q_row(n) bytes, whatever its
 * element type; q_stride is in bytes. */
typedef void bn_kv_encode(const bn_kernels *kernels, const bn_quantizing *a);

typedef struct bn_kv {
    const char *name;
    uint32_t word;            /* bytes of a key word: 2 or 4 */
    uint32_t dims;            /* dimensions per word */
    uint32_t scaled;          /* dimensions of a key per word of scales; 0: none */
    uint32_t value;           /* bytes per element of a value; values of 1 byte are stored in
                               * groups */
    int32_t value_scaled;     /* 1: each value has a float scale */
    int32_t of_images;        /* the bn_kv_type for images, whose cache is not kept: its own, unless
                               * that only saves memory */
    bn_kv_encode *encode_key; /* NULL: keys and values stay f32 */
    bn_kv_encode *encode_value;
    bn_kv_encode *encode_query; /* NULL: queries stay f32 */
} bn_kv;

extern const bn_kv bn_kv_types[BN_KV_TYPES]; /* by bn_kv_type */

/* Words of a key, scales included; the last word of dimensions is padded. */
static inline size_t bn_kv_words(const bn_kv *kv, size_t head_dim) {
    const size_t scales = kv->scaled ? bn_div_up(head_dim, kv->scaled) : 0;
    return bn_div_up(head_dim, kv->dims) + scales;
}

/* Values per group; they interleave by dimension. */
static inline size_t bn_kv_group(const bn_kv *kv) {
    return kv->value == 1 ? BN_VALUE_GROUP : 1;
}

/* Whether the kernels accept an encoded key, its value, and the scale of the value if it has one,
 * which follow each other: BN_ERR_CODE or BN_ERR_SCALE if not. All that is encoded here is. */
bn_status bn_kv_check(const bn_kv *kv, const uint8_t *bytes, size_t head_dim);

/* Bytes of a key and of a value. */
static inline size_t bn_kv_key(const bn_kv *kv, size_t head_dim) {
    return bn_kv_words(kv, head_dim) * kv->word;
}

static inline size_t bn_kv_value(const bn_kv *kv, size_t head_dim) {
    return head_dim * kv->value;
}

#endif
