/* SPDX-License-Identifier: MIT
 *
 * arena.c: see arena.h.
 */
#include "arena.h"

#include "system/pages.h"

enum { ALIGN = 64 };

/* `used` never exceeds the limit, not even briefly, as others would then be refused bytes that are
 * free. */
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

size_t bn_arena_size(size_t blocks, size_t block) {
    return sizeof(bn_arena) + blocks * (sizeof(atomic_uint) + block) + ALIGN;
}

/* Huge pages only where rounding to them wastes less than two blocks per text. */
static int is_huge(size_t block) {
    return block >= BN_HUGE_PAGE / 2;
}

bn_arena *bn_arena_new(bn_budget *budget, size_t blocks, size_t block) {
    bn_arena *a = bn_pages_grow(bn_arena_size(blocks, block), is_huge(block));
    if (!a)
        return NULL;
    a->budget = budget;
    a->blocks = blocks;
    a->block = block;
    atomic_init(&a->users, 1);
    a->refs = (atomic_uint *)(void *)(a + 1);
    a->memory = (uint8_t *)(a + 1) + blocks * sizeof *a->refs;
    a->memory += (ALIGN - (uintptr_t)a->memory % ALIGN) % ALIGN;
    return a;
}

void bn_arena_leave(bn_arena *a) {
    if (atomic_fetch_sub(&a->users, 1) > 1)
        return;
    bn_pages_free(a, bn_arena_size(a->blocks, a->block));
}

void bn_arena_share(bn_arena *a, size_t block) {
    atomic_fetch_add(&a->users, 1);
    atomic_fetch_add(&a->refs[block], 1);
}

void bn_arena_release(bn_arena *a, size_t block) {
    unsigned seen = atomic_load(&a->refs[block]);
    while (!atomic_compare_exchange_weak(&a->refs[block], &seen, seen > 1 ? seen - 1 : BN_LEAVING))
        ;
    if (seen == 1) {
        if (a->budget->most)
            bn_pages_drop(bn_arena_at(a, block), a->block);
        bn_budget_give(a->budget, a->block);
        atomic_store(&a->refs[block], 0);
    }
    bn_arena_leave(a);
}
