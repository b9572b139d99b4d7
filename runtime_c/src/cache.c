/* SPDX-License-Identifier: MIT
 *
 * cache.c: keys and values on their way into the cache: normed, rotated, narrowed.
 */
#include <string.h>

#include "internal.h"

static void rotate(float *head, const float *angle, size_t rope_dim) {
    const size_t half = rope_dim / 2;
    for (size_t i = 0; i < half; i++) {
        const float cosine = angle[2 * i], sine = angle[2 * i + 1];
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
}

static void append_row(const bn_model *m, bn_workspace *w, size_t row, const bn_layer *l,
                       uint32_t layer) {
    const bn_config *c = &m->config;
    const bn_kernels *kernels = &m->kernels;
    const size_t E = c->head_dim, H = c->n_heads, G = c->n_kv_heads;
    float *qkv = w->qkv + row * (H + 2 * G) * E;
    const float *angle = w->angle + row * c->rope_dim;
    const bn_cache *cache = w->rows[row].cache;
    const size_t position = (size_t)w->rows[row].position;

    for (size_t h = 0; h < H + G; h++) {
        const float *gain = h < H ? l->q_norm : l->k_norm;
        if (gain)
            kernels->rms_norm(qkv + h * E, qkv + h * E, gain, E, c->norm_eps);
        rotate(qkv + h * E, angle, c->rope_dim);
    }
    for (size_t g = 0; g < G; g++) {
        const float *k = qkv + (H + g) * E, *v = qkv + (H + G + g) * E;
        const size_t head = layer * cache->layer_stride + g * cache->head_stride;
        const size_t tile = position / BN_LANES * BN_LANES * E + position % BN_LANES;
        if (cache->type == BN_KV_F32) {
            float *keys = (float *)(cache->k + head) + tile;
            for (size_t d = 0; d < E; d++)
                keys[d * BN_LANES] = k[d];
            memcpy((float *)(cache->v + head) + position * E, v, E * sizeof *v);
        } else {
            uint16_t half[1024]; /* head_dim <= 1024, FORMAT.md §2 */
            uint16_t *keys = (uint16_t *)(cache->k + head) + tile;
            kernels->f32_to_f16(half, k, E);
            for (size_t d = 0; d < E; d++)
                keys[d * BN_LANES] = half[d];
            kernels->f32_to_f16((uint16_t *)(cache->v + head) + position * E, v, E);
        }
    }
}

typedef struct pass {
    const bn_model *m;
    bn_workspace *w;
    const bn_layer *l;
    size_t rows;
    uint32_t layer;
} pass;

static void append_rows(void *context, int32_t thread, int32_t n_threads) {
    const pass *p = context;
    size_t first, last;
    bn_share(p->rows, thread, n_threads, &first, &last);
    for (size_t row = first; row < last; row++)
        append_row(p->m, p->w, row, p->l, p->layer);
}

void bn_cache_append(const bn_model *m, bn_workspace *w, size_t rows, const bn_layer *l,
                     uint32_t layer) {
    pass p = {m, w, l, rows, layer};
    if (rows == 1)
        append_rows(&p, 0, 1);
    else
        bn_pool_run(m->pool, append_rows, &p);
}
