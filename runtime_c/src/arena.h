/* SPDX-License-Identifier: MIT
 *
 * arena.h: memory for the keys and values of one text, in reference-counted blocks that other texts
 * may share. The system commits a page when it is first written. A text writes only to blocks that
 * it alone references, and only a text that references a block can share it. So no lock is needed,
 * although texts that share an arena may be in different threads.
 */
#ifndef BITNET_ARENA_H
#define BITNET_ARENA_H

#include <limits.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes taken by the blocks of all texts of a model. */
typedef struct bn_budget {
    atomic_size_t used;
    size_t most; /* 0: no limit */
} bn_budget;

/* Returns 0, taking nothing, if less than `bytes` is left. */
int bn_budget_take(bn_budget *budget, size_t bytes);
void bn_budget_give(bn_budget *budget, size_t bytes);

/* The last reference to the block is gone, but it cannot be taken again yet. */
#define BN_LEAVING UINT_MAX

typedef struct bn_arena {
    bn_budget *budget;
    size_t blocks, block; /* number of blocks; bytes of each */
    atomic_size_t users;  /* the owner, plus one for each reference to each block */
    atomic_uint *refs;    /* [blocks] reference counts, or BN_LEAVING */
    uint8_t *memory;      /* [blocks][block], aligned to 64 bytes, zero */
} bn_arena;

/* An arena of `blocks` blocks of `block` bytes each; NULL if out of memory. */
bn_arena *bn_arena_new(bn_budget *budget, size_t blocks, size_t block);
size_t bn_arena_size(size_t blocks, size_t block);

/* Release the owner's use; the last user frees the arena. */
void bn_arena_leave(bn_arena *arena);

/* Add a reference to a block: one more text shares it, or the owner takes a free block, whose bytes
 * it has taken from the budget. */
void bn_arena_share(bn_arena *arena, size_t block);

/* Drop a reference. The last one returns the bytes to the budget, and the pages to the system if
 * the budget is limited; otherwise the owner keeps them for its next blocks. */
void bn_arena_release(bn_arena *arena, size_t block);

static inline uint8_t *bn_arena_at(const bn_arena *arena, size_t block) {
    return arena->memory + block * arena->block;
}

static inline unsigned bn_arena_refs(const bn_arena *arena, size_t block) {
    return atomic_load(&arena->refs[block]);
}

#endif
