/* SPDX-License-Identifier: MIT
 *
 * kv.h: the types of numbers that a KV cache holds, one row each: what a key and a value take, how
 * floats become such numbers. What reads them is a row of kernels (kernels/attention.h). Nothing
 * else asks which type a cache has.
 */
#ifndef BITNET_KV_H
#define BITNET_KV_H

#include "kernels/kernels.h"

/* Rows of floats, keys, values or queries, to numbers: those of a key to its words, one behind the
 * other. As quantize has it, but s, of those that are not in the words of a key, is what numbers
 * are times; a row of q, whatever its numbers are, has room for n floats or bn_q_row(n) bytes;
 * q_stride is in bytes. */
typedef void bn_kv_encode(const bn_kernels *kernels, const bn_quantizing *a);

typedef struct bn_kv {
    const char *name;
    uint32_t word;            /* bytes of a word of a key: 2 or 4 */
    uint32_t dims;            /* dimensions in a word */
    uint32_t scaled;          /* dimensions of a key before each word of scales; 0: none */
    uint32_t value;           /* bytes of a number of a value; of one they lie in groups */
    int32_t value_scaled;     /* each value has a scale, a float */
    bn_kv_encode *encode_key; /* NULL: keys and values stay floats */
    bn_kv_encode *encode_value;
    bn_kv_encode *encode_query; /* NULL: queries stay floats */
} bn_kv;

extern const bn_kv bn_kv_types[BN_KV_TYPES]; /* by bn_kv_type */

/* Words of a key; the last one of dimensions is filled up. */
static inline size_t bn_kv_words(const bn_kv *kv, size_t head_dim) {
    const size_t scales = kv->scaled ? (head_dim + kv->scaled - 1) / kv->scaled : 0;
    return (head_dim + kv->dims - 1) / kv->dims + scales;
}

/* Values side by side, dimension by dimension. */
static inline size_t bn_kv_group(const bn_kv *kv) {
    return kv->value == 1 ? BN_VALUE_GROUP : 1;
}

/* Bytes of a key and of a value. */
static inline size_t bn_kv_key(const bn_kv *kv, size_t head_dim) {
    return bn_kv_words(kv, head_dim) * kv->word;
}

static inline size_t bn_kv_value(const bn_kv *kv, size_t head_dim) {
    return head_dim * kv->value;
}

#endif
