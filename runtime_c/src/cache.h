/* SPDX-License-Identifier: MIT
 *
 * cache.h: the keys and values of one text.
 */
#ifndef BITNET_CACHE_H
#define BITNET_CACHE_H

#include "file/file.h"
#include "stack.h"

struct bn_pass;

enum { BN_CHUNK_KEYS = 256 }; /* keys of a chunk; fixed, because it is part of the numbers */

/* Position p is at slot p % slots. A layer with a window needs no more than it and the rows of a
 * pass, and forgets what came before: then slots are fewer than positions, and a multiple of
 * BN_CHUNK_KEYS, so that a chunk lies in one piece. Keys lie in tiles [slots/16][E][16 keys] and
 * values in rows [slots][E], so that both kernels of attention read one linear stream. Types of
 * small numbers have some dimensions of a key together, [slots/16][words][16 keys], and scales. */
typedef struct bn_kv_head {
    uint8_t *k, *v;
    float *k_scale, *v_scale; /* [slots], or NULL */
    size_t slots;
} bn_kv_head;

typedef struct bn_cache_part {
    bn_kv_head first;      /* of layers · G heads */
    size_t layers, stride; /* bytes from head to head; of scales: slots */
} bn_cache_part;

typedef struct bn_cache {
    bn_cache_part parts[BN_CACHE_PARTS];
    int32_t type;   /* bn_kv_type */
    size_t prefix;  /* of the text: how many tokens at its beginning see each other (mask.h) */
    size_t written; /* positions there were since it was empty, also if they are forgotten */
} bn_cache;

/* Find the places in `base` for n_ctx positions, of which `batch` are written before the first of
 * them is read; returns the bytes. With base NULL only these. */
size_t bn_cache_lay_out(bn_cache *cache, const bn_stack *stack, size_t n_ctx, size_t batch,
                        uint8_t *base);

bn_kv_head bn_cache_head(const bn_cache *cache, const bn_layer *l, size_t g, size_t G);

/* What is in one to another of the same layout. */
void bn_cache_copy(const bn_cache *from, bn_cache *to, const bn_config *c);

/* The least position from which a text can go on after what is behind was forgotten, but for 0. */
size_t bn_cache_least(const bn_cache *cache, const bn_config *c);

/* Bytes that a position takes in the layers of a part. */
uint64_t bn_cache_token_bytes(const bn_stack *stack, int32_t type, size_t part);

/* Rotate q and k of the rows, append k and v to the caches of a layer. */
void bn_cache_append(struct bn_pass *p, const bn_layer *l);

#endif
