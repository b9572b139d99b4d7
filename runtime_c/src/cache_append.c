/* SPDX-License-Identifier: MIT
 *
 * cache_append.c: normalize and rotate q and k of rows, and store k and v in the caches. Rows whose
 * values lie in one group are quantized and stored together: quantizing one short vector is a chain
 * of dependent steps, and one-byte values of a group interleave.
 */
#include <string.h>

#include "cache.h"
#include "kv.h"
#include "pass.h"

/* Store words of `size` bytes, `step` words apart (both constants). */
static inline void spread(uint8_t *to, const void *words, size_t n, const size_t size,
                          const size_t step) {
    for (size_t i = 0; i < n; i++)
        memcpy(to + i * step * size, (const uint8_t *)words + i * size, size);
}

/* Interleave the values of a group. */
static void weave(uint8_t *restrict to, const int8_t *restrict from, size_t stride, size_t n) {
    for (size_t d = 0; d < n; d++)
        for (size_t j = 0; j < BN_VALUE_GROUP; j++)
            to[d * BN_VALUE_GROUP + j] = (uint8_t)from[j * stride + d];
}

/* Keys or values of `rows` rows of a batch, within one group of positions. */
typedef struct stored {
    const bn_kernels *kernels;
    const bn_kv *kv;
    bn_kv_piece at;
    const bn_cache_part *part;
    size_t slot, rows, E, stride; /* stride: floats from row to row */
} stored;

/* Encoded keys or values, before they are stored. */
typedef struct encoded {
    _Alignas(BN_Q_ALIGN) int8_t numbers[BN_VALUE_GROUP * BN_MAX_HEAD * sizeof(float)];
    float scales[BN_VALUE_GROUP];
    int32_t sums[BN_VALUE_GROUP];
} encoded;

static bn_quantizing encoding(const stored *a, encoded *to, const float *x) {
    return (bn_quantizing){.q = to->numbers,
                           .s = to->scales,
                           .sums = to->sums,
                           .x = x,
                           .q_stride = bn_round_up(a->E * sizeof *x, BN_Q_ALIGN),
                           .x_stride = a->stride,
                           .n = a->E,
                           .rows = a->rows};
}

static void store_keys(const stored *a, const float *k) {
    encoded to;
    const size_t words = bn_kv_words(a->kv, a->E);
    const bn_quantizing e = encoding(a, &to, k);
    if (a->kv->encode_key)
        a->kv->encode_key(a->kernels, &e);
    for (size_t i = 0; i < a->rows; i++) {
        const void *key = a->kv->encode_key ? (void *)(to.numbers + i * e.q_stride)
                                            : (const void *)(k + i * a->stride);
        uint8_t *place = a->at.k + (a->slot + i) % BN_LANES * a->kv->word;
        if (a->kv->word == 2)
            spread(place, key, words, 2, BN_LANES);
        else
            spread(place, key, words, 4, BN_LANES);
    }
}

static void store_values(const stored *a, const float *v) {
    encoded to;
    bn_quantizing e = encoding(a, &to, v);
    if (!a->kv->encode_value) {
        for (size_t i = 0; i < a->rows; i++)
            memcpy(a->at.v + i * a->part->value, v + i * a->stride, a->part->value);
        return;
    }
    if (!a->kv->value_scaled) {
        e.q = (int8_t *)a->at.v, e.q_stride = a->part->value;
        a->kv->encode_value(a->kernels, &e);
        return;
    }
    e.s = a->at.v_scale;
    a->kv->encode_value(a->kernels, &e);
    if (a->rows == BN_VALUE_GROUP) {
        weave(a->at.v, to.numbers, e.q_stride, a->E);
        return;
    }
    for (size_t i = 0; i < a->rows; i++)
        spread(a->at.v + (a->slot + i) % BN_VALUE_GROUP, to.numbers + i * e.q_stride, a->E, 1,
               BN_VALUE_GROUP);
}

static void turn(const bn_pass *p, const bn_norm *norm, float *head, const float *angle) {
    const bn_positions *positions = &p->stack->positions;
    const size_t E = p->stack->config.head_dim;
    if (norm->gain) /* values that are not finite are detected after attention */
        bn_norm_row(&p->m->kernels, norm, head, head, E);
    bn_positions_rotate(head, angle, positions->dim);
}

/* Normalize and rotate heads [g, end) of a row's k, and the heads of q that attend to them. */
static void turn_row(const bn_pass *p, const bn_layer *l, size_t row, size_t g, size_t end) {
    const bn_config *c = &p->stack->config;
    const bn_workspace *w = p->w;
    const size_t E = c->head_dim, H = c->n_heads, G = c->n_kv_heads, of_each = H / G;
    float *q = w->q + row * bn_row_stride(H * E), *k = w->kv + row * bn_row_stride(2 * G * E);
    const float *angle = w->angle + (row * BN_POSITION_TABLES + l->table) * p->stack->positions.dim;

    for (size_t h = g * of_each; h < end * of_each; h++)
        turn(p, &l->q_norm, q + h * E, angle);
    for (size_t h = g; h < end; h++)
        turn(p, &l->k_norm, k + h * E, angle);
}

/* Number of rows, at most `most`, that follow each other and whose values lie in one group. */
static size_t count_near(const bn_row *first, size_t most) {
    const size_t left = BN_VALUE_GROUP - (size_t)first->position % BN_VALUE_GROUP;
    size_t n = 1;
    while (n < bn_min(left, most) && first[n].cache == first->cache &&
           first[n].position == first->position + (int32_t)n)
        n++;
    return n;
}

/* Store key and value of such rows in a head of the cache. */
static void store_rows(const bn_pass *p, const bn_layer *l, size_t row, size_t rows, size_t g) {
    const bn_config *c = &p->stack->config;
    const size_t E = c->head_dim, G = c->n_kv_heads;
    const bn_row *r = &p->w->rows[row];
    const bn_kv_head head = bn_cache_head(r->cache, l, g, G);
    const size_t stride = bn_row_stride(2 * G * E);
    const float *k = p->w->kv + row * stride + g * E;
    stored a = {.kernels = &p->m->kernels,
                .kv = &bn_kv_types[r->cache->type],
                .part = head.part,
                .slot = (size_t)r->position % head.part->slots,
                .rows = rows,
                .E = E,
                .stride = stride};
    a.at = bn_cache_piece(&head, a.slot, rows);
    for (size_t i = 0; i < rows; i++) { /* the next head's; the following tile's */
        const float *later = k + i * a.stride + E;
        bn_fetch(later, (E + BN_LANES) * sizeof *k);
        bn_fetch(later + G * E, (E + BN_LANES) * sizeof *k);
        bn_fetch(a.at.k + (BN_LANES + (a.slot + i) % BN_LANES) * a.part->key, a.part->key);
        bn_fetch(a.at.v + (BN_LANES + i) * a.part->value, a.part->value);
    }
    store_keys(&a, k);
    store_values(&a, k + G * E);
}

typedef struct append {
    const bn_pass *p;
    const bn_layer *l;
} append;

/* Heads [g, last) of rows [row, stop), head by head, as a tile of keys has BN_LANES positions. */
static void append_heads(const append *a, size_t row, size_t stop, size_t g, size_t last) {
    for (size_t i = row; i < stop; i++)
        turn_row(a->p, a->l, i, g, last);
    for (; g < last; g++)
        for (size_t i = row, rows; i < stop; i += rows) {
            rows = count_near(&a->p->w->rows[i], stop - i);
            store_rows(a->p, a->l, i, rows, g);
        }
}

/* An item is a head in as many rows as a tile has positions: threads that write to one tile at a
 * time keep taking its cache lines from each other. */
static void append_items(void *context, int32_t thread, size_t item, size_t end) {
    const append *a = context;
    const size_t G = a->p->stack->config.n_kv_heads;
    (void)thread;
    for (; item < end; item++) {
        const size_t row = item / G * BN_LANES;
        append_heads(a, row, bn_min(row + BN_LANES, a->p->rows), item % G, item % G + 1);
    }
}

void bn_cache_append(bn_pass *p, const bn_layer *l) {
    append a = {p, l};
    const size_t G = p->stack->config.n_kv_heads, items = bn_div_up(p->rows, BN_LANES) * G;
    if (bn_runs_alone(p))
        append_heads(&a, 0, p->rows, 0, G);
    else
        bn_pool_run(p->w->in.pool, items, items, append_items, &a);
}
