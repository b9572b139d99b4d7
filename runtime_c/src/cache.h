/* SPDX-License-Identifier: MIT
 *
 * cache.h: the paged KV cache of one text, in blocks of positions. A block lies in the text's own
 * arena, or in that of another text with the same beginning: the two then share it, copy on write.
 * Its index is the same in both arenas.
 */
#ifndef BITNET_CACHE_H
#define BITNET_CACHE_H

#include "arena.h"
#include "file/file.h"
#include "stack.h"

struct bn_pass;

enum {
    BN_CHUNK_KEYS = 256, /* keys per chunk; fixed, because results depend on it */
    BN_BLOCK_KEYS = 64   /* positions per block */
};
_Static_assert(BN_CHUNK_KEYS % BN_BLOCK_KEYS == 0 && BN_BLOCK_KEYS % (int)BN_LANES == 0,
               "a chunk has whole blocks, a block whole tiles of keys");

static inline void bn_fetch(const void *p, size_t bytes) {
    enum { LINE = 64 };
    for (size_t i = 0; i < bytes; i += LINE)
        __builtin_prefetch((const uint8_t *)p + i);
}

/* Position p is stored in slot p % slots. A layer with a window needs no more slots than the window
 * plus the rows of a pass, and overwrites older positions: there `slots` is smaller than the number
 * of positions, and a multiple of BN_CHUNK_KEYS, so that the slots of a chunk are contiguous.
 *
 * A block has all heads one after the other, so that memory grows with the text and can use huge
 * pages. Each head has keys in tiles [slots/16][E][16 keys], then values in rows [slots][E].
 * Quantized types pack several dimensions of a key into a word, with its scales among the words:
 * [slots/16][words][16 keys]. The scales of values are stored after the values, because they are
 * applied to the attention weights. One-byte values are stored in groups, [slots/4][E][4
 * values]. */
typedef struct bn_cache_part {
    size_t slots, layers, heads; /* heads: over all layers */
    size_t key, value;           /* bytes of each */
    size_t group;                /* values per group */
    size_t head, values, scales; /* bytes of a head in a block; offsets in it of the values and of
                                  * their scales, 0: none */
    size_t block, bytes;         /* bytes of a block, as the budget counts them; of all blocks */
    size_t row;                  /* bytes of a position, without padding */
    uint8_t *base;               /* memory that is not shared; or NULL, and then */
    bn_arena *own, **blocks;     /* the arena that the text writes to, and the arena of each block,
                                  * or NULL */
} bn_cache_part;

static inline size_t bn_cache_part_blocks(const bn_cache_part *part) {
    return bn_div_up(part->slots, BN_BLOCK_KEYS);
}

/* A head of a layer, at byte offset `at` in every block. */
typedef struct bn_kv_head {
    const bn_cache_part *part;
    size_t at;
} bn_kv_head;

/* Contiguous slots of a head, within one block. */
typedef struct bn_kv_piece {
    uint8_t *k, *v; /* tile of the first slot; its value group */
    float *v_scale; /* of the first slot, or NULL */
    size_t slots;
} bn_kv_piece;

typedef struct bn_cache {
    bn_cache_part parts[BN_CACHE_PARTS];
    bn_budget *budget;
    int32_t type;   /* bn_kv_type */
    size_t prefix;  /* of the text: number of tokens at its beginning that see each other
                     * (mask.h) */
    size_t written; /* positions written since it was empty, including forgotten ones */
} bn_cache;

/* Compute the sizes for n_ctx positions, when up to `batch` are written before the first of them is
 * read. Returns the bytes of all blocks. */
size_t bn_cache_plan(bn_cache *cache, const bn_stack *stack, size_t n_ctx, size_t batch);

/* Place the cache in plain, unshared memory of that many bytes. */
void bn_cache_place(bn_cache *cache, uint8_t *base);

/* Set up a cache in blocks, none allocated yet: `table` has bn_cache_blocks pointers. Returns 0 if
 * out of memory; bn_cache_end must follow in any case. */
size_t bn_cache_blocks(const bn_cache *cache);
int bn_cache_begin(bn_cache *cache, bn_arena **table, bn_budget *budget);

/* Make positions [first, first + n) writable. Fails with BN_ERR_CACHE or BN_ERR_MEMORY; existing
 * positions are then unchanged. */
bn_status bn_cache_prepare(bn_cache *cache, size_t first, size_t n);

/* Free all memory; bytes that it may take at most. */
void bn_cache_end(bn_cache *cache);
size_t bn_cache_size(const bn_cache *cache);

/* Share all blocks with another, empty cache of the same plan. */
void bn_cache_share(const bn_cache *from, bn_cache *to);

/* Forget positions from n on; n = 0 releases all blocks. */
void bn_cache_forget(bn_cache *cache, size_t n);

bn_kv_head bn_cache_head(const bn_cache *cache, const bn_layer *l, size_t g, size_t G);

/* At most `most` slots of a head, starting at `slot`, as far as they are contiguous. */
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

/* Fill the positions after the first block up to n, which were prepared, with copies of that
 * block. */
void bn_cache_repeat(bn_cache *cache, size_t n);

/* The least position besides 0 from which a text can continue after forgetting what follows. */
size_t bn_cache_least(const bn_cache *cache, const bn_config *c);

/* Copy one position of a part to or from contiguous bytes, part.row of them: for each head key,
 * value, and the value's scale if it has one. The part must not have forgotten it, and
 * bn_cache_prepare must precede a write. */
void bn_cache_read(const bn_cache *cache, size_t part, size_t position, uint8_t *bytes);
void bn_cache_write(const bn_cache *cache, size_t part, size_t position, const uint8_t *bytes);

/* Whether the kernels accept such bytes: BN_ERR_CODE or BN_ERR_SCALE if not. */
bn_status bn_cache_check(const bn_cache *cache, size_t part, const uint8_t *bytes, size_t head_dim);

/* Bytes per position in the layers of a part. */
uint64_t bn_cache_token_bytes(const bn_stack *stack, int32_t type, size_t part);

/* Rotate q and k of the rows, and append k and v to the caches of a layer. */
void bn_cache_append(struct bn_pass *p, const bn_layer *l);

#endif
