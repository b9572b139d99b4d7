/* SPDX-License-Identifier: MIT
 *
 * cache.h: the keys and values of one text.
 */
#ifndef BITNET_CACHE_H
#define BITNET_CACHE_H

#include "file/file.h"
#include "stack.h"

struct bn_pass;

/* Per layer and KV head, keys lie in tiles [slots/16][E][16 keys] and values in rows [slots][E], so
 * that both kernels of attention read one linear stream. Types of small numbers have some
 * dimensions of a key together, [slots/16][words][16 keys], and scales. */
typedef struct bn_cache {
    uint8_t *k, *v;           /* [n_layers][G] heads of head_stride bytes */
    float *k_scale, *v_scale; /* [n_layers][G][slots], or NULL */
    size_t slots;             /* C rounded up to a tile */
    size_t head_stride;
    int32_t type; /* bn_kv_type */
} bn_cache;

/* Bytes of the keys, or of the values, of n positions of one KV head. */
size_t bn_cache_bytes(const bn_config *c, int32_t type, size_t n);

/* And of their scales. */
size_t bn_cache_scale_bytes(int32_t type, size_t n);

/* Rotate q and k of the rows, append k and v to the caches of a layer. */
void bn_cache_append(struct bn_pass *p, const bn_layer *l);

#endif
