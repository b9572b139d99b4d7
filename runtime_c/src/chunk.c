/* SPDX-License-Identifier: MIT
 *
 * chunk.c: see chunk.h.
 */
#include "chunk.h"

#include <string.h>

/* Find keys [first, end) of a chunk in the cache, or as many of them as are contiguous. */
static bn_kv_piece find(const bn_block *b, size_t first, size_t end) {
    return bn_cache_piece(&b->kv, first % b->kv.part->slots, end - first);
}

/* Scores of all queries with keys [begin, end), padded to whole tiles. */
static void score(const bn_block *b, size_t begin, size_t end) {
    bn_qk a = {.score_stride = BN_CHUNK_KEYS,
               .q = b->q,
               .codes = b->codes,
               .q_scale = b->q_scale,
               .n_q = b->rows * b->group,
               .head_dim = b->config->head_dim,
               .ahead = b->kv.part->block};
    for (size_t key = begin; key < end; key += a.tiles * BN_LANES) {
        const bn_kv_piece at = find(b, key, end);
        a.scores = b->scores + (key - begin);
        a.k = at.k;
        a.tiles = bn_div_up(at.slots, BN_LANES);
        b->m->kernels.attention[b->type].qk(&a);
    }
}

/* Turn a row's scores of keys [low, high) into weights. */
static void soften(const bn_block *b, size_t row, size_t begin, size_t low, size_t high, float *m,
                   float *l) {
    const bn_kernels *kernels = &b->m->kernels;
    const float cap = b->config->attention_softcap;
    for (size_t i = row * b->group; i < (row + 1) * b->group; i++) {
        l[i] = 0;
        if (low >= high)
            continue;
        float *s = b->scores + i * BN_CHUNK_KEYS + (low - begin);
        for (size_t key = 0; cap > 0 && key < high - low; key++)
            s[key] = bn_soft_cap(s[key], cap);
        m[i] = kernels->vectors.max(s, high - low);
        l[i] = kernels->vectors.exp_sum(s, high - low, m[i]);
    }
}

/* o += weights · values of keys [low, high), for `rows` rows starting at `row`. */
static void weigh(const bn_block *b, size_t row, size_t rows, size_t begin, size_t low, size_t high,
                  float *o) {
    const size_t E = b->config->head_dim, first = row * b->group;
    bn_pv a = {.out = o + first * E,
               .p_stride = BN_CHUNK_KEYS,
               .n_q = rows * b->group,
               .head_dim = E,
               .ahead = b->kv.part->block};
    for (; low < high; low += a.keys) {
        const bn_kv_piece at = find(b, low, high);
        a.p = b->scores + first * BN_CHUNK_KEYS + (low - begin);
        a.v = at.v;
        a.keys = at.slots;
        b->m->kernels.attention[b->type].pv(&a);
    }
}

static size_t whole_tiles(size_t keys) {
    return bn_round_up(keys, BN_LANES);
}

/* The scales of values [begin, end). */
static void collect_scales(const bn_block *b, size_t begin, size_t end, float *scale) {
    for (size_t key = begin, n; key < end; key += n, scale += n) {
        const bn_kv_piece at = find(b, key, end);
        n = at.slots;
        memcpy(scale, at.v_scale, n * sizeof *scale);
    }
}

/* Quantize a row's weights of keys [low, high) to integers with one scale; all other weights of the
 * chunk become 0. */
static void round_weights(const bn_block *b, size_t row, size_t begin, size_t low, size_t high,
                          size_t end, const float *v_scale) {
    for (size_t i = row * b->group; i < (row + 1) * b->group; i++) {
        float *s = b->scores + i * BN_CHUNK_KEYS;
        b->weight_scale[i] = b->m->kernels.attention[b->type].weigh(
            (uint8_t *)s, s, v_scale, low - begin, high - begin, whole_tiles(end - begin));
    }
}

/* o = integer weights · values of keys [begin, end), padded to whole tiles with weights of 0. The
 * integer sum is exact, so it does not depend on how the cache is split into pieces. */
static void weigh_integers(const bn_block *b, size_t begin, size_t end, float *o) {
    const size_t E = b->config->head_dim, n_q = b->rows * b->group;
    bn_pv a = {.sums = (int32_t *)(void *)o,
               .p_stride = BN_CHUNK_KEYS * sizeof *b->scores,
               .n_q = n_q,
               .head_dim = E,
               .ahead = b->kv.part->block};
    for (size_t key = begin; key < end; key += a.keys) {
        const bn_kv_piece at = find(b, key, end);
        a.codes = (const uint8_t *)b->scores + 2 * (key - begin);
        a.v = at.v;
        a.keys = whole_tiles(at.slots);
        b->m->kernels.attention[b->type].pv(&a);
    }
    for (size_t i = 0; i < n_q; i++)
        b->m->kernels.vectors.scale_sums(&(bn_scaling){.y = o + i * E,
                                                       .acc = a.sums + i * E,
                                                       .scales = &b->weight_scale[i],
                                                       .s = &(const float){1},
                                                       .n = E,
                                                       .tokens = 1});
}

/* Too short a stream for the hardware prefetcher. */
static void fetch_scales(const bn_block *b, size_t begin, size_t end) {
    while (begin < end) {
        const bn_kv_piece at = find(b, begin, end);
        bn_fetch(at.v_scale, at.slots * sizeof *at.v_scale);
        begin += at.slots;
    }
}

/* Floats are added in the order of the keys: first those that a row sees alone, then those that all
 * rows see, then again those of a row alone. Integer sums do not depend on the order. */
void bn_chunk_attend(const bn_block *b, size_t begin, size_t end, float *m, float *l, float *o) {
    const int integers = b->m->kernels.attention[b->type].weigh != NULL;
    size_t low = begin, high = end; /* seen by all rows */
    float v_scale[BN_CHUNK_KEYS];
    if (b->kv.part->scales)
        fetch_scales(b, begin, end);
    score(b, begin, end);
    if (integers)
        collect_scales(b, begin, end, v_scale);
    memset(o, 0, b->rows * b->group * b->config->head_dim * sizeof *o);
    for (size_t row = 0; row < b->rows; row++) {
        const size_t first = bn_max(bn_mask_first(b->mask, b->position + row), begin);
        const size_t from = bn_min(first, end);
        const size_t to = bn_min(bn_mask_end(b->mask, b->position + row), end);
        soften(b, row, begin, from, to, m, l);
        if (integers)
            round_weights(b, row, begin, from, bn_max(from, to), end, v_scale);
        low = bn_max(low, from);
        high = bn_min(high, to);
    }
    if (integers) {
        weigh_integers(b, begin, end, o);
        return;
    }
    if (low >= high)
        low = high = end;
    for (size_t row = 0; row < b->rows; row++)
        weigh(b, row, 1, begin, bn_max(bn_mask_first(b->mask, b->position + row), begin),
              bn_min(bn_mask_end(b->mask, b->position + row), low), o);
    weigh(b, 0, b->rows, begin, low, high, o);
    for (size_t row = 0; row < b->rows; row++)
        weigh(b, row, 1, begin, high, bn_min(bn_mask_end(b->mask, b->position + row), end), o);
}

void bn_chunk_merge(float *m, float *l, float *o, float m2, float l2, const float *o2, size_t E) {
    if (l2 == 0)
        return;
    if (*l == 0) {
        *m = m2, *l = l2;
        memcpy(o, o2, E * sizeof *o);
        return;
    }
    const float top = *m > m2 ? *m : m2;
    const float a = bn_exp(*m - top), b = bn_exp(m2 - top);
    *m = top;
    *l = *l * a + l2 * b;
    for (size_t d = 0; d < E; d++)
        o[d] = o[d] * a + o2[d] * b;
}

void bn_chunk_finish(float *out, const float *o, float l, size_t E) {
    const float r = 1 / l;
    for (size_t d = 0; d < E; d++)
        out[d] = o[d] * r;
}
