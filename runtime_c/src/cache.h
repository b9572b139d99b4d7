/* SPDX-License-Identifier: MIT
 *
 * cache.h: the keys and values of one text. They lie in blocks of positions. A block lies in the
 * arena of the text, or in that of another which began alike: then both see it until one of them
 * has something else to write there, and copies it before. Its place in either is the same.
 */
#ifndef BITNET_CACHE_H
#define BITNET_CACHE_H

#include "arena.h"
#include "file/file.h"
#include "stack.h"

struct bn_pass;

enum {
    BN_CHUNK_KEYS = 256, /* keys of a chunk; fixed, because it is part of the numbers */
    BN_BLOCK_KEYS = 64   /* positions of a block; a chunk has whole ones */
};

/* Ask memory for what is needed soon. */
static inline void bn_fetch(const void *p, size_t bytes) {
    enum { LINE = 64 };
    for (size_t i = 0; i < bytes; i += LINE)
        __builtin_prefetch((const uint8_t *)p + i);
}

/* Position p is at slot p % slots. A layer with a window needs no more than it and the rows of a
 * pass, and forgets what came before: then slots are fewer than positions, and a multiple of
 * BN_CHUNK_KEYS, so that slots of a chunk are in a row.
 *
 * A block has all heads, one behind the other, so that memory grows with the text and may be of
 * huge pages. Of a head it has keys in tiles [slots/16][E][16 keys], then values in rows
 * [slots][E]. Types of small numbers have some dimensions of a key together, and its scales among
 * them, [slots/16][words][16 keys]; scales of values lie behind these, because weights are what
 * they scale. Values of bytes lie in groups, [slots/4][E][4 values]. */
typedef struct bn_cache_part {
    size_t slots, layers, heads; /* heads: of all layers */
    size_t key, value;           /* bytes of each */
    size_t group;                /* values of a group */
    size_t head, values, scales; /* bytes of a head in a block; where its values begin, and their
                                  * scales, 0: there are none */
    size_t block, bytes;         /* of a block, which the budget counts; of all that there can be */
    size_t row;                  /* bytes of a position in all heads */
    uint8_t *base;               /* memory that is not shared: then there is no more, else */
    bn_arena *own, **blocks;     /* where the text writes, and where each block lies or NULL */
} bn_cache_part;

static inline size_t bn_cache_part_blocks(const bn_cache_part *part) {
    return (part->slots + BN_BLOCK_KEYS - 1) / BN_BLOCK_KEYS;
}

/* A head of a layer: bytes from the beginning of a block to its own. */
typedef struct bn_kv_head {
    const bn_cache_part *part;
    size_t at;
} bn_kv_head;

/* Some of its slots, in a row: of one block. */
typedef struct bn_kv_piece {
    uint8_t *k, *v; /* of the tile of the first; of its group */
    float *v_scale; /* of the first, or NULL */
    size_t slots;
} bn_kv_piece;

typedef struct bn_cache {
    bn_cache_part parts[BN_CACHE_PARTS];
    bn_budget *budget;
    int32_t type;   /* bn_kv_type */
    size_t prefix;  /* of the text: how many tokens at its beginning see each other (mask.h) */
    size_t written; /* positions there were since it was empty, also if they are forgotten */
} bn_cache;

/* Sizes for n_ctx positions, of which `batch` are written before the first of them is read. Returns
 * the bytes of all memory there can be. */
size_t bn_cache_plan(bn_cache *cache, const bn_stack *stack, size_t n_ctx, size_t batch);

/* A cache in plain memory of as many bytes, which is not shared. */
void bn_cache_place(bn_cache *cache, uint8_t *base);

/* A cache in blocks, none of which is there yet: `table` has bn_cache_blocks pointers. Returns 0
 * where there is no memory; bn_cache_end has to follow in any case. */
size_t bn_cache_blocks(const bn_cache *cache);
int bn_cache_begin(bn_cache *cache, bn_arena **table, bn_budget *budget);

/* Positions [first, first + n) can be written. Fails with BN_ERR_CACHE or BN_ERR_MEMORY; then what
 * is there is as before. */
bn_status bn_cache_prepare(bn_cache *cache, size_t first, size_t n);

/* All memory that it has, and may have. */
void bn_cache_end(bn_cache *cache);
size_t bn_cache_size(const bn_cache *cache);

/* The other text begins as this one, which is of the same plan, and it is empty. */
void bn_cache_share(const bn_cache *from, bn_cache *to);

/* Nothing from position n on is needed any more; of n = 0 all memory may go. */
void bn_cache_forget(bn_cache *cache, size_t n);

bn_kv_head bn_cache_head(const bn_cache *cache, const bn_layer *l, size_t g, size_t G);

/* Slots of a head from one on, at most so many, as far as they lie in one piece. */
static inline bn_kv_piece bn_cache_piece(const bn_kv_head *head, size_t slot, size_t most) {
    const bn_cache_part *p = head->part;
    const size_t block = slot / BN_BLOCK_KEYS, i = slot % BN_BLOCK_KEYS;
    uint8_t *at =
        (p->base ? p->base + block * p->block : bn_arena_at(p->blocks[block], block)) + head->at;
    return (bn_kv_piece){.k = at + i / BN_LANES * BN_LANES * p->key,
                         .v = at + p->values + i / p->group * p->group * p->value,
                         .v_scale = p->scales ? (float *)(void *)(at + p->scales) + i : NULL,
                         .slots = bn_min(BN_BLOCK_KEYS - i, most)};
}

/* Positions behind the first block up to n, which were prepared, become copies of those in it. */
void bn_cache_repeat(bn_cache *cache, size_t n);

/* The least position from which a text can go on after what is behind was forgotten, but for 0. */
size_t bn_cache_least(const bn_cache *cache, const bn_config *c);

/* What a position has in all heads of a part, to bytes one behind the other or from them: for each
 * head key, value, and the scale of this if it has one. It is one that the part did not forget, and
 * before it is written it was prepared. */
size_t bn_cache_row(const bn_cache *cache, size_t part); /* how many */
void bn_cache_read(const bn_cache *cache, const bn_stack *stack, size_t part, size_t position,
                   uint8_t *bytes);
void bn_cache_write(const bn_cache *cache, const bn_stack *stack, size_t part, size_t position,
                    const uint8_t *bytes);

/* Bytes that a position takes in the layers of a part. */
uint64_t bn_cache_token_bytes(const bn_stack *stack, int32_t type, size_t part);

/* Rotate q and k of the rows, append k and v to the caches of a layer. */
void bn_cache_append(struct bn_pass *p, const bn_layer *l);

#endif
