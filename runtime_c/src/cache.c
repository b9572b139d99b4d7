/* SPDX-License-Identifier: MIT
 *
 * cache.c: keys and values on their way into the cache: normed, rotated, narrowed.
 */
#include <string.h>

#include "internal.h"
#include "kv.h"

size_t bn_cache_bytes(const bn_config *c, int32_t type, size_t n) {
    return n * bn_kv_key(&bn_kv_types[type], c->head_dim);
}

size_t bn_cache_scale_bytes(int32_t type, size_t n) {
    return bn_kv_types[type].scaled ? n * sizeof(float) : 0;
}

static void rotate(float *head, const float *angle, size_t rope_dim) {
    const size_t half = rope_dim / 2;
    for (size_t i = 0; i < half; i++) {
        const float cosine = angle[2 * i], sine = angle[2 * i + 1];
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
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

static void append_row(const bn_model *m, bn_workspace *w, size_t row, const bn_layer *l,
                       uint32_t layer) {
    const bn_config *c = &m->config;
    const bn_kernels *kernels = &m->kernels;
    const size_t E = c->head_dim, H = c->n_heads, G = c->n_kv_heads;
    float *qkv = w->qkv + row * (H + 2 * G) * E;
    const float *angle = w->angle + (l->table * w->batch + row) * c->rope_dim;
    const bn_cache *cache = w->rows[row].cache;

    for (size_t h = 0; h < H + G; h++) {
        const float *gain = h < H ? l->q_norm : l->k_norm;
        if (gain)
            kernels->vectors.rms_norm(qkv + h * E, qkv + h * E, gain, E, c->norm_eps);
        rotate(qkv + h * E, angle, c->rope_dim);
    }
    for (size_t g = 0; g < G; g++)
        store(kernels, cache, layer * G + g, (size_t)w->rows[row].position, E, qkv + (H + g) * E,
              qkv + (H + G + g) * E);
}

typedef struct pass {
    const bn_model *m;
    bn_workspace *w;
    const bn_layer *l;
    size_t rows;
    uint32_t layer;
} pass;

static void append_rows(void *context, int32_t thread, size_t first, size_t end) {
    const pass *p = context;
    (void)thread;
    for (size_t row = first; row < end; row++)
        append_row(p->m, p->w, row, p->l, p->layer);
}

void bn_cache_append(const bn_model *m, bn_workspace *w, size_t rows, const bn_layer *l,
                     uint32_t layer) {
    pass p = {m, w, l, rows, layer};
    if (rows == 1)
        append_rows(&p, 0, 0, 1);
    else
        bn_pool_run(m->pool, rows, rows, append_rows, &p);
}
