/* SPDX-License-Identifier: MIT
 *
 * cache.c: keys and values on their way into the cache: normed, rotated, narrowed.
 */
#include "cache.h"

#include <string.h>

#include "kv.h"
#include "pass.h"

enum { ALIGN = 64 };

/* Bytes of the keys, or of the values, of n positions of a head. */
static size_t head_bytes(const bn_cache *cache, const bn_config *c, size_t n) {
    return n * bn_kv_key(&bn_kv_types[cache->type], c->head_dim);
}

/* And of their scales. */
static size_t scale_bytes(const bn_cache *cache, size_t n) {
    return bn_kv_types[cache->type].scaled ? n * sizeof(float) : 0;
}

static size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

/* A pass over tokens that see what is behind them begins to read when all is written. */
static size_t slots_of(const bn_config *c, size_t part, size_t n_ctx, size_t batch) {
    const size_t all = round_up(n_ctx, BN_LANES);
    const size_t ring = round_up(c->sliding_window - 1 + batch, BN_CHUNK_KEYS);
    return part == 1 && c->sliding_window && c->mask == BN_MASK_CAUSAL && ring < all ? ring : all;
}

/* Sizes cannot overflow: FORMAT.md §2 bounds every factor. */
size_t bn_cache_lay_out(bn_cache *cache, const bn_stack *stack, size_t n_ctx, size_t batch,
                        uint8_t *base) {
    const bn_config *c = &stack->config;
    size_t used = 0;
    for (size_t i = 0; i < BN_CACHE_PARTS; i++) {
        bn_cache_part *part = &cache->parts[i];
        const size_t slots = slots_of(c, i, n_ctx, batch);
        *part = (bn_cache_part){.first.slots = slots,
                                .layers = stack->cached[i],
                                .stride = round_up(head_bytes(cache, c, slots), ALIGN)};
        const size_t heads = part->layers * c->n_kv_heads, bytes = heads * part->stride;
        const size_t scales = heads * scale_bytes(cache, slots);
        if (base) {
            part->first.k = base + used;
            part->first.v = part->first.k + bytes;
        }
        if (base && scales) {
            part->first.k_scale = (float *)(void *)(part->first.v + bytes);
            part->first.v_scale = part->first.k_scale + heads * slots;
        }
        used += 2 * (bytes + scales);
    }
    return used;
}

static bn_kv_head head_of(const bn_cache_part *part, size_t head) {
    bn_kv_head h = part->first;
    h.k += head * part->stride;
    h.v += head * part->stride;
    if (h.k_scale) {
        h.k_scale += head * h.slots;
        h.v_scale += head * h.slots;
    }
    return h;
}

bn_kv_head bn_cache_head(const bn_cache *cache, const bn_layer *l, size_t g, size_t G) {
    return head_of(&cache->parts[l->part], l->place * G + g);
}

/* The first n positions are in front, if n is rounded up to a tile, unless slots are used again. */
void bn_cache_copy(const bn_cache *from, bn_cache *to, const bn_config *c) {
    to->prefix = from->prefix;
    to->written = from->written;
    for (size_t i = 0; i < BN_CACHE_PARTS; i++) {
        const bn_cache_part *part = &from->parts[i];
        const size_t n = round_up(from->written, BN_LANES), all = part->first.slots;
        const size_t slots = n < all ? n : all, bytes = head_bytes(from, c, slots);
        const size_t scales = scale_bytes(from, slots);
        for (size_t head = 0; head < part->layers * c->n_kv_heads; head++) {
            const bn_kv_head a = head_of(part, head), b = head_of(&to->parts[i], head);
            memcpy(b.k, a.k, bytes);
            memcpy(b.v, a.v, bytes);
            if (scales) {
                memcpy(b.k_scale, a.k_scale, scales);
                memcpy(b.v_scale, a.v_scale, scales);
            }
        }
    }
}

/* The next row sees a window less 1 of what was before: none of these may have been written over.
 */
size_t bn_cache_least(const bn_cache *cache, const bn_config *c) {
    const bn_cache_part *local = &cache->parts[1];
    size_t least = cache->prefix;
    if (local->layers && cache->written > local->first.slots) {
        const size_t kept = cache->written - local->first.slots + c->sliding_window - 1;
        least = kept > least ? kept : least;
    }
    return least;
}

uint64_t bn_cache_token_bytes(const bn_stack *stack, int32_t type, size_t part) {
    const bn_cache cache = {.type = type};
    return (uint64_t)stack->cached[part] * stack->config.n_kv_heads * 2 *
           (head_bytes(&cache, &stack->config, 1) + scale_bytes(&cache, 1));
}

enum { MAX_HEAD = 1024 }; /* FORMAT.md §2 */

/* A key's words of `size` bytes (a constant) to their places in the tile. */
static inline void spread(uint8_t *to, const uint8_t *words, size_t n, const size_t size) {
    for (size_t i = 0; i < n; i++)
        memcpy(to + i * BN_LANES * size, words + i * size, size);
}

/* Put the key and the value of one position into a head of the cache. */
static void store(const bn_kernels *kernels, const bn_kv *kv, const bn_kv_head *head,
                  size_t position, size_t E, const float *k, const float *v) {
    const size_t slot = position % head->slots;
    const size_t tile = slot / BN_LANES * BN_LANES, lane = slot % BN_LANES;
    const size_t words = bn_kv_words(kv, E), word = bn_kv_word(kv), value = bn_kv_value(kv, E);
    uint8_t *key = head->k + (tile * words + lane) * word;
    _Alignas(BN_Q_ALIGN) uint8_t numbers[MAX_HEAD * sizeof(float)];

    const float k_scale = kv->encode(kernels, numbers, k, E);
    if (word == 2)
        spread(key, numbers, words, 2);
    else
        spread(key, numbers, words, 4);
    const float v_scale = kv->encode(kernels, numbers, v, E);
    memcpy(head->v + slot * value, numbers, value);
    if (kv->scaled) {
        head->k_scale[slot] = k_scale;
        head->v_scale[slot] = v_scale;
    }
}

static void append_row(const bn_pass *p, const bn_layer *l, size_t row) {
    const bn_config *c = &p->stack->config;
    const bn_positions *positions = &p->stack->positions;
    const bn_kernels *kernels = &p->m->kernels;
    const bn_workspace *w = p->w;
    const size_t E = c->head_dim, H = c->n_heads, G = c->n_kv_heads;
    float *q = w->q + row * H * E, *k = w->kv + row * 2 * G * E, *v = k + G * E;
    const float *angle = w->angle + (l->table * w->room + row) * positions->dim;
    const bn_cache *cache = w->rows[row].cache;

    for (size_t h = 0; h < H + G; h++) {
        const bn_norm *norm = h < H ? &l->q_norm : &l->k_norm;
        float *head = h < H ? q + h * E : k + (h - H) * E;
        if (norm->gain) /* what is not finite shows behind attention */
            bn_norm_row(kernels, norm, head, head, E);
        bn_positions_rotate(head, angle, positions->dim);
    }
    for (size_t g = 0; g < G; g++) {
        const bn_kv_head head = bn_cache_head(cache, l, g, G);
        store(kernels, &bn_kv_types[cache->type], &head, (size_t)w->rows[row].position, E,
              k + g * E, v + g * E);
    }
}

typedef struct append {
    const bn_pass *p;
    const bn_layer *l;
} append;

static void append_rows(void *context, int32_t thread, size_t first, size_t end) {
    const append *a = context;
    (void)thread;
    for (size_t row = first; row < end; row++)
        append_row(a->p, a->l, row);
}

void bn_cache_append(bn_pass *p, const bn_layer *l) {
    bn_each_row(p, append_rows, &(append){p, l});
}
