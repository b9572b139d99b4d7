/* SPDX-License-Identifier: MIT
 *
 * arena.c: see arena.h.
 */
#include "arena.h"

#include <stdlib.h>

enum { ALIGN = 64 };

int bn_budget_take(bn_budget *budget, size_t bytes) {
    const size_t before = atomic_fetch_add(&budget->used, bytes);
    if (!budget->most || (before <= budget->most && bytes <= budget->most - before))
        return 1;
    atomic_fetch_sub(&budget->used, bytes);
    return 0;
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
    atomic_fetch_sub(&a->budget->used, a->spent);
    free(a);
}

void bn_arena_take(bn_arena *a, size_t block, size_t bytes) {
    a->spent += a->taken[block] ? 0 : bytes;
    a->taken[block] = 1;
    bn_arena_share(a, block);
}

void bn_arena_share(bn_arena *a, size_t block) {
    atomic_fetch_add(&a->users, 1);
    atomic_fetch_add(&a->refs[block], 1);
}

void bn_arena_release(bn_arena *a, size_t block) {
    atomic_fetch_sub(&a->refs[block], 1);
    bn_arena_leave(a);
}
