/* SPDX-License-Identifier: MIT
 *
 * kv.h: the types of numbers that a KV cache holds, one row each: what a key and a value take, how
 * floats become such numbers. What reads them is a row of kernels (kernels/attention.h). Nothing
 * else asks which type a cache has.
 */
#ifndef BITNET_KV_H
#define BITNET_KV_H

#include "kernels/kernels.h"

/* n floats to a key as its words lie one behind the other. `to` has room for n floats or
 * bn_q_row(n) bytes, and is aligned as quantize wants it. */
typedef void bn_kv_encode_key(const bn_kernels *kernels, void *to, const float *x, size_t n);

/* n floats to numbers, which stand for number · what this returns. The same of `to`, but that of
 * values without scales is their place in the cache. */
typedef float bn_kv_encode(const bn_kernels *kernels, void *to, const float *x, size_t n);

typedef struct bn_kv {
    const char *name;
    uint32_t word;                /* bytes of a word of a key: 2 or 4 */
    uint32_t dims;                /* dimensions in a word */
    uint32_t scaled;              /* dimensions of a key before each word of scales; 0: none */
    uint32_t value;               /* bytes of a number of a value; of one they lie in groups */
    int32_t value_scaled;         /* each value has a scale, a float */
    bn_kv_encode_key *encode_key; /* NULL: keys and values stay floats */
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
