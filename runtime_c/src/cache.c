/* SPDX-License-Identifier: MIT
 *
 * cache.c: the layout of keys and values in the cache; see cache.h.
 */
#include "cache.h"

#include <string.h>

#include "kv.h"

enum { ALIGN = 64 };

/* Non-causal masks need all slots: such a pass reads only after all its rows are written. */
static size_t slots_of(const bn_config *c, size_t part, size_t n_ctx, size_t batch) {
    const size_t all = bn_round_up(n_ctx, BN_LANES);
    const size_t ring = bn_round_up(c->sliding_window - 1 + batch, BN_CHUNK_KEYS);
    return part == 1 && c->sliding_window && c->mask == BN_MASK_CAUSAL && ring < all ? ring : all;
}

static size_t position_bytes(const bn_kv *kv, size_t heads, size_t E) {
    return heads * (bn_kv_key(kv, E) + bn_kv_value(kv, E) + (kv->value_scaled ? sizeof(float) : 0));
}

/* Sizes cannot overflow: FORMAT.md §2 bounds every factor. */
size_t bn_cache_plan(bn_cache *cache, const bn_stack *stack, size_t n_ctx, size_t batch) {
    const bn_config *c = &stack->config;
    const bn_kv *kv = &bn_kv_types[cache->type];
    size_t bytes = 0;
    for (size_t i = 0; i < BN_CACHE_PARTS; i++) {
        const size_t slots = slots_of(c, i, n_ctx, batch);
        const size_t heads = stack->cached[i] * c->n_kv_heads;
        bn_cache_part *part = &cache->parts[i];
        *part = (bn_cache_part){.slots = slots,
                                .layers = stack->cached[i],
                                .key = bn_kv_key(kv, c->head_dim),
                                .value = bn_kv_value(kv, c->head_dim),
                                .group = bn_kv_group(kv),
                                .heads = heads,
                                .row = position_bytes(kv, heads, c->head_dim)};
        const size_t keys = bn_min(slots, BN_BLOCK_KEYS); /* per block */
        part->values = bn_round_up(keys * part->key, ALIGN);
        part->head = part->values + bn_round_up(keys * part->value, ALIGN);
        if (kv->value_scaled) {
            part->scales = part->head;
            part->head += bn_round_up(keys * sizeof(float), ALIGN);
        }
        part->block = heads * part->head;
        part->bytes = bn_cache_part_blocks(part) * part->block;
        bytes += part->bytes;
    }
    return bytes;
}

void bn_cache_place(bn_cache *cache, uint8_t *base) {
    for (size_t i = 0; i < BN_CACHE_PARTS; i++) {
        cache->parts[i].base = base;
        base = base ? base + cache->parts[i].bytes : NULL; /* only measuring */
    }
}

static bn_kv_head head_of(const bn_cache_part *part, size_t head) {
    return (bn_kv_head){.part = part, .at = head * part->head};
}

bn_kv_head bn_cache_head(const bn_cache *cache, const bn_layer *l, size_t g, size_t G) {
    return head_of(&cache->parts[l->part], l->place * G + g);
}

/* The next row sees window - 1 earlier positions, none of which may have been overwritten. */
size_t bn_cache_least(const bn_cache *cache, const bn_config *c) {
    const bn_cache_part *local = &cache->parts[1];
    size_t least = cache->prefix;
    if (local->layers && cache->written > local->slots)
        least = bn_max(least, cache->written - local->slots + c->sliding_window - 1);
    return least;
}

/* --- positions as bytes --- */

/* Contiguous bytes to copy to, or to copy from; the other is NULL. */
typedef struct copying {
    uint8_t *out;
    const uint8_t *in;
} copying;

/* Copy n words that are `step` bytes apart in the cache. */
static inline void move(copying *c, uint8_t *place, size_t word, size_t n, size_t step) {
    for (size_t i = 0; i < n; i++, place += step)
        if (c->in)
            memcpy(place, c->in, word), c->in += word;
        else
            memcpy(c->out, place, word), c->out += word;
}

/* Copy all heads of a position. Words of a key interleave with those of its tile, one-byte elements
 * of a value with those of its group. */
static void move_position(const bn_cache *cache, size_t part, size_t position, copying c) {
    const bn_cache_part *p = &cache->parts[part];
    const size_t slot = position % p->slots, word = bn_kv_types[cache->type].word;
    for (size_t head = 0; head < p->heads; head++) {
        const bn_kv_head h = head_of(p, head);
        const bn_kv_piece at = bn_cache_piece(&h, slot, 1);
        move(&c, at.k + slot % BN_LANES * word, word, p->key / word, BN_LANES * word);
        if (p->group > 1)
            move(&c, at.v + slot % p->group, 1, p->value, p->group);
        else
            move(&c, at.v, p->value, 1, 0);
        if (at.v_scale)
            move(&c, (uint8_t *)at.v_scale, sizeof *at.v_scale, 1, 0);
    }
}

void bn_cache_read(const bn_cache *cache, size_t part, size_t position, uint8_t *bytes) {
    move_position(cache, part, position, (copying){.out = bytes});
}

void bn_cache_write(const bn_cache *cache, size_t part, size_t position, const uint8_t *bytes) {
    move_position(cache, part, position, (copying){.in = bytes});
}

bn_status bn_cache_check(const bn_cache *cache, size_t part, const uint8_t *bytes,
                         size_t head_dim) {
    const bn_cache_part *p = &cache->parts[part];
    bn_status status = BN_OK;
    for (size_t head = 0; head < p->heads && !status; head++)
        status =
            bn_kv_check(&bn_kv_types[cache->type], bytes + head * (p->row / p->heads), head_dim);
    return status;
}

uint64_t bn_cache_token_bytes(const bn_stack *stack, int32_t type, size_t part) {
    const bn_config *c = &stack->config;
    return position_bytes(&bn_kv_types[type], stack->cached[part] * c->n_kv_heads, c->head_dim);
}
