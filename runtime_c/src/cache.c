/* SPDX-License-Identifier: MIT
 *
 * cache.c: keys and values on their way into the cache: normed, rotated, narrowed.
 */
#include "cache.h"

#include <string.h>

#include "kv.h"
#include "pass.h"

size_t bn_cache_bytes(const bn_config *c, int32_t type, size_t n) {
    return n * bn_kv_key(&bn_kv_types[type], c->head_dim);
}

size_t bn_cache_scale_bytes(int32_t type, size_t n) {
    return bn_kv_types[type].scaled ? n * sizeof(float) : 0;
}

enum { MAX_HEAD = 1024 }; /* FORMAT.md §2 */

/* A key's words of `size` bytes (a constant) to their places in the tile. */
static inline void spread(uint8_t *to, const uint8_t *words, size_t n, const size_t size) {
    for (size_t i = 0; i < n; i++)
        memcpy(to + i * BN_LANES * size, words + i * size, size);
}

/* Put the key and the value of one position into a head of the cache. */
static void store(const bn_kernels *kernels, const bn_cache *cache, size_t head, size_t position,
                  size_t E, const float *k, const float *v) {
    const bn_kv *kv = &bn_kv_types[cache->type];
    const size_t tile = position / BN_LANES * BN_LANES, lane = position % BN_LANES;
    const size_t words = bn_kv_words(kv, E), word = bn_kv_word(kv), value = bn_kv_value(kv, E);
    uint8_t *key = cache->k + head * cache->head_stride + (tile * words + lane) * word;
    _Alignas(BN_Q_ALIGN) uint8_t numbers[MAX_HEAD * sizeof(float)];

    const float k_scale = kv->encode(kernels, numbers, k, E);
    if (word == 2)
        spread(key, numbers, words, 2);
    else
        spread(key, numbers, words, 4);
    const float v_scale = kv->encode(kernels, numbers, v, E);
    memcpy(cache->v + head * cache->head_stride + position * value, numbers, value);
    if (kv->scaled) {
        cache->k_scale[head * cache->slots + position] = k_scale;
        cache->v_scale[head * cache->slots + position] = v_scale;
    }
}

static void append_row(const bn_pass *p, const bn_layer *l, size_t row) {
    const bn_config *c = &p->stack->config;
    const bn_positions *positions = &p->stack->positions;
    const bn_kernels *kernels = &p->m->kernels;
    const bn_workspace *w = p->w;
    const size_t E = c->head_dim, H = c->n_heads, G = c->n_kv_heads;
    float *qkv = w->qkv + row * (H + 2 * G) * E;
    const float *angle = w->angle + (l->table * w->batch + row) * positions->dim;
    const bn_cache *cache = w->rows[row].cache;

    for (size_t h = 0; h < H + G; h++) {
        const bn_norm *norm = h < H ? &l->q_norm : &l->k_norm;
        if (norm->gain) /* what is not finite shows behind attention */
            bn_norm_row(kernels, norm, qkv + h * E, qkv + h * E, E);
        bn_positions_rotate(qkv + h * E, angle, positions->dim);
    }
    for (size_t g = 0; g < G; g++)
        store(kernels, cache, l->index * G + g, (size_t)w->rows[row].position, E, qkv + (H + g) * E,
              qkv + (H + G + g) * E);
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
