/* SPDX-License-Identifier: MIT
 *
 * arena.h: memory for the keys and values of one text, in blocks which other texts may see too.
 * The system gives it when it is written to. A text may write to a block that it alone sees; who
 * sees a block may let others see it. So none of this needs a lock, although texts that share an
 * arena may be in different threads.
 */
#ifndef BITNET_ARENA_H
#define BITNET_ARENA_H

#include <limits.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that the blocks of all texts of a model take. */
typedef struct bn_budget {
    atomic_size_t used;
    size_t most; /* 0: no limit */
} bn_budget;

/* 0: there is not so much left, and nothing was taken. */
int bn_budget_take(bn_budget *budget, size_t bytes);
void bn_budget_give(bn_budget *budget, size_t bytes);

/* Nobody sees the block any more, and nobody may take it yet. */
#define BN_LEAVING UINT_MAX

typedef struct bn_arena {
    bn_budget *budget;
    size_t blocks, block; /* bytes of each */
    atomic_size_t users;  /* its owner, and each of the texts that see a block, for each block */
    atomic_uint *refs;    /* [blocks] texts that see it, or BN_LEAVING */
    uint8_t *memory;      /* [blocks][block], aligned to 64 bytes, zero */
} bn_arena;

/* For so many blocks of so many bytes. NULL: there is no memory. */
bn_arena *bn_arena_new(bn_budget *budget, size_t blocks, size_t block);
size_t bn_arena_size(size_t blocks, size_t block);

/* The owner goes; the last user frees the arena. */
void bn_arena_leave(bn_arena *arena);

/* A text more sees a block, or the owner one that nobody sees, for which it took its bytes from the
 * budget. */
void bn_arena_share(bn_arena *arena, size_t block);

/* A text less. The last one gives its bytes back, and its pages if there is a budget: else the text
 * may as well keep them for what it writes next. */
void bn_arena_release(bn_arena *arena, size_t block);

static inline uint8_t *bn_arena_at(const bn_arena *arena, size_t block) {
    return arena->memory + block * arena->block;
}

static inline unsigned bn_arena_refs(const bn_arena *arena, size_t block) {
    return atomic_load(&arena->refs[block]);
}

#endif
