/* SPDX-License-Identifier: MIT
 *
 * arena.c: see arena.h.
 */
#include "arena.h"

#include <stdlib.h>

enum { ALIGN = 64 };

/* Never more than there is, not even for a moment: others would be refused what they may have. */
int bn_budget_take(bn_budget *budget, size_t bytes) {
    size_t used = atomic_load(&budget->used);
    do {
        if (budget->most && (used > budget->most || bytes > budget->most - used))
            return 0;
    } while (!atomic_compare_exchange_weak(&budget->used, &used, used + bytes));
    return 1;
}

void bn_budget_give(bn_budget *budget, size_t bytes) {
    atomic_fetch_sub(&budget->used, bytes);
}

size_t bn_arena_size(size_t blocks, size_t bytes) {
    return sizeof(bn_arena) + blocks * (sizeof(atomic_uint) + 1) + ALIGN + bytes;
}

bn_arena *bn_arena_new(bn_budget *budget, size_t blocks, size_t bytes) {
    bn_arena *a = calloc(1, bn_arena_size(blocks, bytes)); /* so what is not written is not there */
    if (!a)
        return NULL;
    a->budget = budget;
    atomic_init(&a->users, 1);
    a->refs = (atomic_uint *)(void *)(a + 1);
    a->taken = (uint8_t *)(a->refs + blocks);
    a->memory = a->taken + blocks;
    a->memory += (ALIGN - (uintptr_t)a->memory % ALIGN) % ALIGN;
    return a;
}

void bn_arena_leave(bn_arena *a) {
    if (atomic_fetch_sub(&a->users, 1) > 1)
        return;
    bn_budget_give(a->budget, a->spent);
    free(a);
}

size_t bn_arena_take(bn_arena *a, size_t block, size_t bytes) {
    const size_t cost = a->taken[block] ? 0 : bytes;
    a->spent += cost;
    a->taken[block] = 1;
    bn_arena_share(a, block);
    return cost;
}

void bn_arena_share(bn_arena *a, size_t block) {
    atomic_fetch_add(&a->users, 1);
    atomic_fetch_add(&a->refs[block], 1);
}

void bn_arena_release(bn_arena *a, size_t block) {
    atomic_fetch_sub(&a->refs[block], 1);
    bn_arena_leave(a);
}
