/* SPDX-License-Identifier: MIT
 *
 * attention.c: softmax(q·Kᵀ)·V over the cache.
 *
 * A row sees a range of keys, split into chunks at multiples of BN_CHUNK_KEYS. Each chunk gives a
 * maximum m, a sum l of exp(score - m) and a vector o of values with the same weights; chunks are
 * merged in order. The split depends on positions alone, so a token gets the same bits whether it
 * is decoded (chunks distributed over threads) or part of a prompt (rows distributed over threads).
 */
#include "attention.h"

#include "chunk.h"
#include "kv.h"
#include "pass.h"

enum { BLOCK_QUERIES = 32 }; /* queries of one KV head per pass over a chunk */

static size_t group_size(const bn_config *c) {
    return c->n_heads / c->n_kv_heads;
}

/* Rows of a prompt that share a pass over the keys. */
static size_t block_rows(const bn_config *c) {
    const size_t group = group_size(c);
    return group < BLOCK_QUERIES ? BLOCK_QUERIES / group : 1;
}

/* A thread's scratch for n queries of one KV head. */
typedef struct scratch {
    int8_t *codes; /* codes, q, q_scale, scores and weight_scale: see bn_block */
    float *q, *q_scale, *scores, *weight_scale;
    float *m, *l, *o;           /* [n], [n], [n][E]: one chunk */
    float *m_sum, *l_sum, *sum; /* all chunks so far */
} scratch;

static size_t floats_per_query(size_t E) {
    return bn_q_row(E) / sizeof(float) + 3 * E + BN_CHUNK_KEYS + 6;
}

static scratch scratch_of(const bn_workspace *w, int32_t thread, size_t n, size_t E) {
    float *at = w->attend + (size_t)thread * w->attend_stride;
    scratch s = {.codes = (int8_t *)at};
    s.q = at + n * bn_q_row(E) / sizeof *at;
    s.o = s.q + n * E;
    s.sum = s.o + n * E;
    s.scores = s.sum + n * E;
    s.q_scale = s.scores + n * BN_CHUNK_KEYS;
    s.weight_scale = s.q_scale + n;
    s.m = s.weight_scale + n, s.l = s.m + n, s.m_sum = s.l + n, s.l_sum = s.m_sum + n;
    return s;
}

size_t bn_attend_floats(const bn_config *c) {
    return block_rows(c) * group_size(c) * floats_per_query(c->head_dim);
}

size_t bn_partial_floats(const bn_config *c, size_t n_ctx) {
    return (n_ctx / BN_CHUNK_KEYS + 1) * block_rows(c) * c->n_heads * (c->head_dim + 2);
}

/* Attention of all rows of a pass in one layer. */
typedef struct attend {
    const bn_pass *p;
    const bn_layer *l;
} attend;

/* Rows in the block that starts at `row`: consecutive positions of one text. */
static size_t count_rows(const bn_pass *p, size_t row) {
    const bn_row *first = &p->w->rows[row];
    size_t n = 1;
    while (n < block_rows(&p->stack->config) && row + n < p->rows &&
           first[n].cache == first->cache && first[n].position == first->position + (int32_t)n)
        n++;
    return n;
}

/* Output of query i of KV head g. */
static float *output(const bn_pass *p, size_t row, size_t g, size_t i) {
    const bn_config *c = &p->stack->config;
    return p->w->in.h + row * p->w->in.wide + (g * group_size(c) + i) * c->head_dim;
}

static bn_mask mask_of(const bn_pass *p, const bn_layer *l, size_t row) {
    return (bn_mask){.window = l->mask.window, .prefix = p->w->rows[row].cache->prefix};
}

static void scale(float *y, const float *x, float factor, size_t n) {
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * factor;
}

/* Encode four queries at a time: of one row, or of several rows if each has only one per KV
 * head. */
static void encode_queries(const bn_block *b, const float *x, size_t x_stride, const scratch *s) {
    enum { ENCODED_QUERIES = 4 };
    const size_t E = b->config->head_dim, step = b->group == 1 ? x_stride : E;
    const size_t n = b->group == 1 ? b->rows : b->group, all = b->rows * b->group;
    int32_t sums[ENCODED_QUERIES];
    for (size_t i = 0, rows; i < all; i += rows) {
        rows = bn_min(n - i % n, ENCODED_QUERIES);
        const bn_quantizing a = {.q = s->codes + i * bn_q_row(E),
                                 .s = s->q_scale + i,
                                 .sums = sums,
                                 .x = x + i / n * x_stride + i % n * step,
                                 .q_stride = bn_q_row(E),
                                 .x_stride = step,
                                 .n = E,
                                 .rows = rows};
        bn_kv_types[b->type].encode_query(&b->m->kernels, &a);
    }
    scale(s->q_scale, s->q_scale, b->config->attention_scale, all);
}

/* The block of `rows` rows starting at `row` for KV head g, with its queries gathered. */
static bn_block make_block(const bn_pass *p, const bn_layer *l, size_t row, size_t rows, size_t g,
                           const scratch *s) {
    const bn_config *c = &p->stack->config;
    const size_t E = c->head_dim, group = group_size(c);
    const bn_cache *cache = p->w->rows[row].cache;
    const bn_kv *kv = &bn_kv_types[cache->type];
    bn_block b = {.m = p->m,
                  .config = c,
                  .kv = bn_cache_head(cache, l, g, c->n_kv_heads),
                  .type = cache->type,
                  .rows = rows,
                  .group = group,
                  .position = (size_t)p->w->rows[row].position,
                  .mask = mask_of(p, l, row),
                  .q = s->q,
                  .codes = s->codes,
                  .q_scale = s->q_scale,
                  .scores = s->scores,
                  .weight_scale = s->weight_scale};
    const size_t stride = bn_row_stride(c->n_heads * E);
    const float *from = p->w->q + row * stride + g * group * E;
    if (kv->encode_query)
        encode_queries(&b, from, stride, s);
    for (size_t i = 0; i < rows; i++, from += stride) {
        if (!kv->encode_query)
            scale(s->q + i * group * E, from, c->attention_scale, group * E);
        bn_fetch(from + group * E, (group * E + BN_LANES) * sizeof *from); /* the next head's */
    }
    return b;
}

/* One block with its context split into chunks. */
typedef struct chunks {
    size_t low, n;    /* first chunk; chunks */
    size_t keys;      /* end of the range that the last row sees */
    float *m, *l, *o; /* [n][G][rows·group]; o: [E] for each */
} chunks;

static chunks chunks_of(const bn_pass *p, const bn_layer *l) {
    const bn_config *c = &p->stack->config;
    const size_t position = (size_t)p->w->rows[0].position;
    const bn_mask mask = mask_of(p, l, 0);
    chunks s = {.low = bn_mask_first(mask, position) / BN_CHUNK_KEYS,
                .keys = bn_mask_end(mask, position + p->rows - 1)};
    s.n = bn_div_up(s.keys, BN_CHUNK_KEYS) - s.low;
    s.m = p->w->partial;
    s.l = s.m + s.n * p->rows * c->n_heads;
    s.o = s.l + s.n * p->rows * c->n_heads;
    return s;
}

/* Merge the chunks of all queries of KV head g, once they are all done. */
static void merge_chunks(const bn_pass *p, const chunks *s, size_t g) {
    const bn_config *c = &p->stack->config;
    const size_t E = c->head_dim, group = group_size(c), n = p->rows * group;
    for (size_t i = 0; i < n; i++) {
        const size_t sum = g * n + i;
        for (size_t chunk = 1; chunk < s->n; chunk++) {
            const size_t at = (chunk * c->n_kv_heads + g) * n + i;
            bn_chunk_merge(&s->m[sum], &s->l[sum], s->o + sum * E, s->m[at], s->l[at],
                           s->o + at * E, E);
        }
        bn_chunk_finish(output(p, i / group, g, i % group), s->o + sum * E, s->l[sum], E);
    }
}

/* Items are (KV head, chunk) pairs; the thread that completes the last chunk of a head merges. */
static void split_keys(void *context, int32_t thread, size_t first, size_t last) {
    const attend *a = context;
    const bn_pass *p = a->p;
    const bn_config *c = &p->stack->config;
    const size_t G = c->n_kv_heads, n = p->rows * group_size(c);
    const chunks s = chunks_of(p, a->l);
    const scratch memory = scratch_of(p->w, thread, n, c->head_dim);
    bn_block b = {0};
    for (size_t item = first; item < last; item++) {
        const size_t g = item / s.n, chunk = item % s.n, at = (chunk * G + g) * n;
        const size_t begin = (s.low + chunk) * BN_CHUNK_KEYS;
        const size_t end = bn_min(begin + BN_CHUNK_KEYS, s.keys);
        if (item == first || chunk == 0)
            b = make_block(p, a->l, 0, p->rows, g, &memory);
        bn_chunk_attend(&b, begin, end, s.m + at, s.l + at, s.o + at * c->head_dim);
        if (atomic_fetch_add(&p->w->chunks_done[g], 1) + 1 == s.n)
            merge_chunks(p, &s, g);
    }
}

/* One block over all keys that its rows see, chunk by chunk. */
static void attend_block(const bn_pass *p, const bn_layer *l, size_t row, size_t rows, size_t g,
                         int32_t thread) {
    const bn_config *c = &p->stack->config;
    const size_t E = c->head_dim, group = group_size(c), n = rows * group;
    const scratch memory = scratch_of(p->w, thread, n, E), *s = &memory;
    const bn_block b = make_block(p, l, row, rows, g, s);
    const size_t keys = bn_mask_end(b.mask, b.position + rows - 1);
    const size_t low = bn_mask_first(b.mask, b.position) / BN_CHUNK_KEYS * BN_CHUNK_KEYS;
    for (size_t begin = low; begin < keys; begin += BN_CHUNK_KEYS) {
        const size_t end = bn_min(begin + BN_CHUNK_KEYS, keys);
        if (begin == low) {
            bn_chunk_attend(&b, begin, end, s->m_sum, s->l_sum, s->sum);
            continue;
        }
        bn_chunk_attend(&b, begin, end, s->m, s->l, s->o);
        for (size_t i = 0; i < n; i++)
            bn_chunk_merge(&s->m_sum[i], &s->l_sum[i], s->sum + i * E, s->m[i], s->l[i],
                           s->o + i * E, E);
    }
    for (size_t i = 0; i < n; i++)
        bn_chunk_finish(output(p, row + i / group, g, i % group), s->sum + i * E, s->l_sum[i], E);
}

/* Many blocks: items are (block, KV head) pairs. */
static void split_rows(void *context, int32_t thread, size_t first, size_t last) {
    const attend *a = context;
    const bn_pass *p = a->p;
    size_t item = 0;
    for (size_t row = 0, rows; row < p->rows; row += rows) {
        rows = count_rows(p, row);
        for (size_t g = 0; g < p->stack->config.n_kv_heads; g++, item++)
            if (item >= first && item < last)
                attend_block(p, a->l, row, rows, g, thread);
    }
}

void bn_attention(bn_pass *p, const bn_layer *l) {
    const size_t G = p->stack->config.n_kv_heads, rows = p->rows;
    bn_workspace *w = p->w;
    attend a = {p, l};
    if (w->in.pool && count_rows(p, 0) == rows) {
        for (size_t g = 0; g < G; g++)
            atomic_init(&w->chunks_done[g], 0);
        const size_t items = chunks_of(p, l).n * G;
        bn_pool_run(w->in.pool, items, items, split_keys, &a);
    } else {
        size_t items = 0;
        for (size_t row = 0; row < rows; row += count_rows(p, row))
            items += G;
        bn_pool_run(w->in.pool, items, items, split_rows, &a);
    }
}
