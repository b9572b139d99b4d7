/* SPDX-License-Identifier: MIT
 *
 * cache_blocks.c: allocation and sharing of the blocks of a text: the middle part of cache.h.
 */
#include <string.h>

#include "cache.h"

size_t bn_cache_blocks(const bn_cache *cache) {
    size_t n = 0;
    for (size_t i = 0; i < BN_CACHE_PARTS; i++)
        n += bn_cache_part_blocks(&cache->parts[i]);
    return n;
}

size_t bn_cache_size(const bn_cache *cache) {
    size_t bytes = 0;
    for (const bn_cache_part *p = cache->parts; p < cache->parts + BN_CACHE_PARTS; p++)
        bytes += p->layers ? bn_arena_size(bn_cache_part_blocks(p), p->block) : 0;
    return bytes;
}

/* Give the text a new arena to write to. Returns 0 if out of memory. */
static int make_arena(bn_cache *cache, bn_cache_part *part) {
    bn_arena *arena = bn_arena_new(cache->budget, bn_cache_part_blocks(part), part->block);
    if (!arena)
        return 0;
    if (part->own)
        bn_arena_leave(part->own);
    part->own = arena;
    return 1;
}

int bn_cache_begin(bn_cache *cache, bn_arena **table, bn_budget *budget) {
    int made = 1;
    cache->budget = budget;
    for (bn_cache_part *p = cache->parts; p < cache->parts + BN_CACHE_PARTS; p++) {
        p->blocks = table;
        table += bn_cache_part_blocks(p);
        made = made && (!p->layers || make_arena(cache, p));
    }
    return made;
}

static void release(bn_cache_part *part, size_t block) {
    if (part->blocks[block])
        bn_arena_release(part->blocks[block], block);
    part->blocks[block] = NULL;
}

void bn_cache_end(bn_cache *cache) {
    for (bn_cache_part *p = cache->parts; p < cache->parts + BN_CACHE_PARTS; p++) {
        for (size_t block = 0; block < bn_cache_part_blocks(p); block++)
            release(p, block);
        if (p->own)
            bn_arena_leave(p->own);
        p->own = NULL;
    }
}

/* Positions before n keep their slots in a ring with more blocks than that; otherwise no block is
 * released. */
void bn_cache_forget(bn_cache *cache, size_t n) {
    for (bn_cache_part *p = cache->parts; p < cache->parts + BN_CACHE_PARTS; p++) {
        for (size_t block = bn_div_up(n, BN_BLOCK_KEYS); block < bn_cache_part_blocks(p); block++)
            release(p, block);
    }
    if (n == 0)
        cache->prefix = cache->written = 0;
}

void bn_cache_share(const bn_cache *from, bn_cache *to) {
    to->prefix = from->prefix;
    to->written = from->written;
    for (size_t i = 0; i < BN_CACHE_PARTS; i++) {
        const bn_cache_part *a = &from->parts[i], *b = &to->parts[i];
        for (size_t block = 0; block < bn_cache_part_blocks(a); block++) {
            if (a->blocks[block] && block * BN_BLOCK_KEYS < from->written)
                b->blocks[block] = a->blocks[block];
            if (b->blocks[block])
                bn_arena_share(b->blocks[block], block);
        }
    }
}

/* --- writing --- */

/* Consecutive blocks of a part, wrapping around its ring. */
typedef struct range {
    size_t first, n;
} range;

static range range_of(const bn_cache_part *part, size_t position, size_t n) {
    const size_t first = position / BN_BLOCK_KEYS, all = bn_cache_part_blocks(part);
    const size_t end = bn_div_up(position + n, BN_BLOCK_KEYS);
    return (range){.first = first, .n = part->layers ? bn_min(end - first, all) : 0};
}

static size_t nth(const bn_cache_part *part, range r, size_t i) {
    return (r.first + i) % bn_cache_part_blocks(part);
}

/* Whether only this text references a block, in whichever arena. */
static int is_alone(const bn_cache_part *part, size_t block) {
    return part->blocks[block] && bn_arena_refs(part->blocks[block], block) == 1;
}

/* Whether the text's arena is free at all blocks to be written. Where other texts still reference a
 * block there, a new arena is needed. */
static int has_places(const bn_cache_part *part, range r) {
    for (size_t i = 0; i < r.n; i++) {
        const size_t block = nth(part, r, i);
        if (!is_alone(part, block) && bn_arena_refs(part->own, block) > 0)
            return 0;
    }
    return 1;
}

/* Bytes to take from the budget. */
static size_t missing(const bn_cache_part *part, range r) {
    size_t bytes = 0;
    for (size_t i = 0; i < r.n; i++) {
        const size_t block = nth(part, r, i);
        bytes += is_alone(part, block) ? 0 : part->block;
    }
    return bytes;
}

/* Returns the bytes to charge to the budget: fewer than `missing` returned if other texts have
 * released blocks meanwhile. */
static size_t take(bn_cache_part *part, range r) {
    size_t bytes = 0;
    for (size_t i = 0; i < r.n; i++) {
        const size_t block = nth(part, r, i);
        if (is_alone(part, block))
            continue;
        bn_arena_share(part->own, block);
        bytes += part->block;
        if (part->blocks[block])
            memcpy(bn_arena_at(part->own, block), bn_arena_at(part->blocks[block], block),
                   part->block);
        release(part, block);
        part->blocks[block] = part->own;
    }
    return bytes;
}

bn_status bn_cache_prepare(bn_cache *cache, size_t first, size_t n) {
    size_t bytes = 0;
    for (bn_cache_part *p = cache->parts; p < cache->parts + BN_CACHE_PARTS; p++) {
        const range r = range_of(p, first, n);
        if (r.n > 0 && !has_places(p, r) && !make_arena(cache, p))
            return BN_ERR_MEMORY;
        bytes += missing(p, r);
    }
    if (bytes > 0 && !bn_budget_take(cache->budget, bytes))
        return BN_ERR_CACHE;
    for (bn_cache_part *p = cache->parts; p < cache->parts + BN_CACHE_PARTS; p++)
        bytes -= take(p, range_of(p, first, n));
    bn_budget_give(cache->budget, bytes);
    return BN_OK;
}

void bn_cache_repeat(bn_cache *cache, size_t n) {
    for (bn_cache_part *p = cache->parts; p < cache->parts + BN_CACHE_PARTS; p++) {
        const range r = range_of(p, BN_BLOCK_KEYS, n - BN_BLOCK_KEYS);
        for (size_t i = 0; i < r.n; i++) {
            const size_t block = nth(p, r, i);
            if (block > 0)
                memcpy(bn_arena_at(p->blocks[block], block), bn_arena_at(p->blocks[0], 0),
                       p->block);
        }
    }
    cache->written = bn_max(cache->written, n);
}
