/* SPDX-License-Identifier: MIT
 *
 * kv.h: the types of numbers that a KV cache holds, one row each: what a key and a value take, how
 * floats become such numbers. What reads them is a row of kernels (kernels/attention.h). Nothing
 * else asks which type a cache has.
 */
#ifndef BITNET_KV_H
#define BITNET_KV_H

#include "kernels/kernels.h"

/* n floats to numbers of a type, which stand for number · what this returns. `to` has room for n
 * floats or bn_q_row(n) bytes, and is aligned as quantize wants it. */
typedef float bn_kv_encode(const bn_kernels *kernels, void *to, const float *x, size_t n);

typedef struct bn_kv {
    const char *name;
    uint32_t bits;              /* of a number */
    uint32_t together;          /* dimensions of a key side by side, in a word of 2 or 4 bytes */
    int32_t scaled;             /* each key and each value has a scale */
    bn_kv_encode *encode;       /* keys and values; NULL: they stay floats */
    bn_kv_encode *encode_query; /* NULL: queries stay floats */
} bn_kv;

extern const bn_kv bn_kv_types[BN_KV_TYPES]; /* by bn_kv_type */

/* Words of a key, and their bytes. */
static inline size_t bn_kv_words(const bn_kv *kv, size_t head_dim) {
    return (head_dim + kv->together - 1) / kv->together;
}

static inline size_t bn_kv_word(const bn_kv *kv) {
    return kv->together * kv->bits / 8;
}

/* Bytes of a key, with its last word filled up, and of a value, which is no longer. */
static inline size_t bn_kv_key(const bn_kv *kv, size_t head_dim) {
    return bn_kv_words(kv, head_dim) * bn_kv_word(kv);
}

static inline size_t bn_kv_value(const bn_kv *kv, size_t head_dim) {
    return (head_dim * kv->bits + 7) / 8;
}

#endif
