/* SPDX-License-Identifier: MIT
 *
 * cache.c: keys and values on their way into the cache: normed, rotated, narrowed.
 */
#include "cache.h"

#include <string.h>

#include "pass.h"

size_t bn_cache_bytes(const bn_config *c, int32_t type, size_t n) {
    switch (type) {
    case BN_KV_F32:
        return n * c->head_dim * sizeof(float);
    case BN_KV_INT8:
        return n * ((c->head_dim + 3) / 4 * 4);
    default:
        return n * c->head_dim * sizeof(uint16_t);
    }
}

size_t bn_cache_scale_bytes(int32_t type, size_t n) {
    return type == BN_KV_INT8 ? n * sizeof(float) : 0;
}

enum { MAX_HEAD = 1024 }; /* FORMAT.md §2 */

/* Put the key and the value of one position into a head of the cache. */
static void store(const bn_kernels *kernels, const bn_cache *cache, size_t head, size_t position,
                  size_t E, const float *k, const float *v) {
    const size_t tile = position / BN_LANES * BN_LANES, lane = position % BN_LANES;
    uint8_t *keys = cache->k + head * cache->head_stride;
    uint8_t *values = cache->v + head * cache->head_stride;
    if (cache->type == BN_KV_F32) {
        float *to = (float *)(void *)keys + tile * E + lane;
        for (size_t d = 0; d < E; d++)
            to[d * BN_LANES] = k[d];
        memcpy(values + position * E * sizeof *v, v, E * sizeof *v);
    } else if (cache->type == BN_KV_F16) {
        uint16_t half[MAX_HEAD], *to = (uint16_t *)(void *)keys + tile * E + lane;
        kernels->f32_to_f16(half, k, E);
        for (size_t d = 0; d < E; d++)
            to[d * BN_LANES] = half[d];
        kernels->f32_to_f16((uint16_t *)(void *)values + position * E, v, E);
    } else { /* a word is four dimensions of a key */
        const size_t words = (E + 3) / 4, padded = bn_q_row(E);
        const size_t scale = head * cache->slots + position;
        _Alignas(BN_Q_ALIGN) int8_t codes[MAX_HEAD + BN_Q_ALIGN]; /* bn_q_row(E) */
        int32_t sum;
        cache->k_scale[scale] = 1 / kernels->quantize(codes, &sum, k, E, padded);
        for (size_t i = 0; i < words; i++)
            memcpy(keys + 4 * (tile * words + i * BN_LANES + lane), codes + 4 * i, 4);
        cache->v_scale[scale] = 1 / kernels->quantize(codes, &sum, v, E, padded);
        memcpy(values + position * E, codes, E);
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
