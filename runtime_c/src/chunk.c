/* SPDX-License-Identifier: MIT
 *
 * chunk.c: see chunk.h.
 */
#include "chunk.h"

#include <string.h>

#include "kv.h"

/* Where the cache has a key. A chunk lies there as one piece. */
static size_t slot(const bn_block *b, size_t key) {
    return key % b->kv.slots;
}

/* Scores of all queries with the keys of `tiles` tiles from key `begin` on. */
static void score(const bn_block *b, size_t begin, size_t tiles) {
    const size_t E = b->config->head_dim;
    const bn_qk a = {.scores = b->scores,
                     .score_stride = BN_CHUNK_KEYS,
                     .q = b->q,
                     .codes = b->codes,
                     .q_scale = b->q_scale,
                     .n_q = b->rows * b->group,
                     .k = b->kv.k + slot(b, begin) * bn_kv_key(&bn_kv_types[b->type], E),
                     .k_scale = b->kv.k_scale ? b->kv.k_scale + slot(b, begin) : NULL,
                     .head_dim = E,
                     .tiles = tiles};
    b->m->kernels.attention[b->type].qk(&a);
}

/* Scores of a row's keys [low, high) to weights; times the scales of values if these have some. */
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
            s[key] = cap * (1 - 2 / (bn_exp(s[key] / cap * 2) + 1));
        m[i] = kernels->vectors.max(s, high - low);
        l[i] = kernels->vectors.exp_sum(s, high - low, m[i]);
        if (b->kv.v_scale)
            for (size_t key = 0; key < high - low; key++)
                s[key] *= b->kv.v_scale[slot(b, low) + key];
    }
}

/* o += weights · values of keys [low, high), for `rows` rows from `row` on. */
static void weigh(const bn_block *b, size_t row, size_t rows, size_t begin, size_t low, size_t high,
                  float *o) {
    const size_t E = b->config->head_dim, first = row * b->group;
    if (low >= high)
        return;
    const bn_pv a = {.out = o + first * E,
                     .p = b->scores + first * BN_CHUNK_KEYS + (low - begin),
                     .p_stride = BN_CHUNK_KEYS,
                     .n_q = rows * b->group,
                     .v = b->kv.v + slot(b, low) * bn_kv_value(&bn_kv_types[b->type], E),
                     .head_dim = E,
                     .keys = high - low};
    b->m->kernels.attention[b->type].pv(&a);
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* Values are added in the order of keys: what a row sees alone before and after what all see. */
void bn_chunk_attend(const bn_block *b, size_t begin, size_t end, float *m, float *l, float *o) {
    size_t low = begin, high = end; /* seen by all rows */
    if (b->kv.k_scale)              /* streams too short for the hardware to see them coming */
        for (size_t key = 0; key < end - begin; key += BN_LANES) {
            __builtin_prefetch(b->kv.k_scale + slot(b, begin) + key);
            __builtin_prefetch(b->kv.v_scale + slot(b, begin) + key);
        }
    score(b, begin, (end - begin + BN_LANES - 1) / BN_LANES);
    memset(o, 0, b->rows * b->group * b->config->head_dim * sizeof *o);
    for (size_t row = 0; row < b->rows; row++) {
        const size_t from = larger(bn_mask_first(b->mask, b->position + row), begin);
        const size_t to = smaller(bn_mask_end(b->mask, b->position + row), end);
        soften(b, row, begin, from, to, m, l);
        low = larger(low, from);
        high = smaller(high, to);
    }
    if (low >= high)
        low = high = end;
    for (size_t row = 0; row < b->rows; row++)
        weigh(b, row, 1, begin, larger(bn_mask_first(b->mask, b->position + row), begin),
              smaller(bn_mask_end(b->mask, b->position + row), low), o);
    weigh(b, 0, b->rows, begin, low, high, o);
    for (size_t row = 0; row < b->rows; row++)
        weigh(b, row, 1, begin, high, smaller(bn_mask_end(b->mask, b->position + row), end), o);
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
