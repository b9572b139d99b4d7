/* SPDX-License-Identifier: MIT
 *
 * attention.c: softmax(q·Kᵀ)·V over the cache.
 *
 * A row sees a range of keys, cut at multiples of BN_CHUNK_KEYS. Each chunk gives a maximum m,
 * a sum l of exp(score - m) and a vector o of values weighted alike; chunks are merged in order.
 * The cut depends on positions alone, so a token gets the same bits whether it is decoded (chunks
 * shared among threads) or part of a prompt (rows shared among threads).
 */
#include <math.h>
#include <string.h>

#include "internal.h"

enum { BLOCK_QUERIES = 32 }; /* queries of one KV head that go through a chunk together */

static size_t group_size(const bn_config *c) {
    return c->n_heads / c->n_kv_heads;
}

/* Rows of a prompt that share a pass over the keys. */
static size_t block_rows(const bn_config *c) {
    const size_t group = group_size(c);
    return group < BLOCK_QUERIES ? BLOCK_QUERIES / group : 1;
}

/* A thread's memory for n queries of one KV head. */
typedef struct scratch {
    int8_t *codes;              /* [n][bn_q_row(E)] queries of BN_KV_INT8 */
    float *q, *q_scale;         /* [n][E], [n] */
    float *scores;              /* [n][BN_CHUNK_KEYS] */
    float *m, *l, *o;           /* [n], [n], [n][E] of one chunk */
    float *m_sum, *l_sum, *sum; /* of the chunks so far */
} scratch;

static size_t floats_per_query(size_t E) {
    return bn_q_row(E) / sizeof(float) + 3 * E + BN_CHUNK_KEYS + 5;
}

static scratch scratch_of(const bn_workspace *w, int32_t thread, size_t n, size_t E) {
    float *at = w->attend + (size_t)thread * w->attend_stride;
    scratch s = {.codes = (int8_t *)at};
    s.q = at + n * bn_q_row(E) / sizeof *at;
    s.o = s.q + n * E;
    s.sum = s.o + n * E;
    s.scores = s.sum + n * E;
    s.q_scale = s.scores + n * BN_CHUNK_KEYS;
    s.m = s.q_scale + n, s.l = s.m + n, s.m_sum = s.l + n, s.l_sum = s.m_sum + n;
    return s;
}

size_t bn_attend_floats(const bn_config *c) {
    return block_rows(c) * group_size(c) * floats_per_query(c->head_dim);
}

size_t bn_partial_floats(const bn_config *c, size_t n_ctx) {
    return (n_ctx / BN_CHUNK_KEYS + 1) * block_rows(c) * c->n_heads * (c->head_dim + 2);
}

/* --- one chunk of keys --- */

/* Queries of `rows` consecutive positions of one text, for one KV head. */
typedef struct block {
    const bn_model *m;
    const uint8_t *k, *v;           /* of the KV head: tiles and rows from position 0 */
    const float *k_scale, *v_scale; /* of BN_KV_INT8 */
    int32_t type;
    size_t rows, group; /* rows · group queries, row by row */
    size_t position;    /* of the first row */
    scratch s;          /* its queries times the attention scale */
} block;

static size_t first_key(const bn_config *c, size_t position) {
    return c->sliding_window && position + 1 > c->sliding_window ? position + 1 - c->sliding_window
                                                                 : 0;
}

/* Scores of all queries with the keys of `tiles` tiles from key `begin` on. */
static void score(const block *b, size_t begin, size_t tiles) {
    const bn_kernels *kernels = &b->m->kernels;
    const size_t E = b->m->config.head_dim, n = b->rows * b->group;
    const scratch *s = &b->s;
    if (b->type == BN_KV_F32)
        kernels->qk_f32(s->scores, BN_CHUNK_KEYS, s->q, n, (const float *)b->k + begin * E, E,
                        tiles);
    else if (b->type == BN_KV_F16)
        kernels->qk_f16(s->scores, BN_CHUNK_KEYS, s->q, n, (const uint16_t *)b->k + begin * E, E,
                        tiles);
    else
        kernels->qk_int8(s->scores, BN_CHUNK_KEYS, s->codes, s->q_scale, n,
                         (const int8_t *)b->k + begin * ((E + 3) / 4 * 4), b->k_scale + begin, E,
                         tiles);
}

/* o += p·V for n_q queries and n keys from `key` on; p holds the scales of values. */
static void weigh(const block *b, float *o, const float *p, size_t n_q, size_t key, size_t n) {
    const size_t E = b->m->config.head_dim;
    if (n == 0)
        return;
    if (b->type == BN_KV_F32)
        b->m->kernels.pv_f32(o, p, BN_CHUNK_KEYS, n_q, (const float *)b->v + key * E, E, n);
    else if (b->type == BN_KV_F16)
        b->m->kernels.pv_f16(o, p, BN_CHUNK_KEYS, n_q, (const uint16_t *)b->v + key * E, E, n);
    else
        b->m->kernels.pv_int8(o, p, BN_CHUNK_KEYS, n_q, (const int8_t *)b->v + key * E, E, n);
}

/* Fill m, l and o of every query for keys [begin, end) of one chunk; rows that see none of them
 * get l = 0. */
static void attend_chunk(const block *b, size_t begin, size_t end, float *m, float *l, float *o) {
    const bn_config *c = &b->m->config;
    const bn_kernels *kernels = &b->m->kernels;
    const size_t E = c->head_dim, n_q = b->rows * b->group;
    const size_t tiles = (end - begin + BN_LANES - 1) / BN_LANES;

    score(b, begin, tiles);
    memset(o, 0, n_q * E * sizeof *o);

    /* Each row sees [low, high) of the chunk; [common_low, common_high) is seen by all. */
    size_t common_low = begin, common_high = end;
    for (size_t row = 0; row < b->rows; row++) {
        const size_t position = b->position + row;
        size_t low = first_key(c, position), high = position + 1;
        low = low > begin ? low : begin;
        high = high < end ? high : end;
        common_low = low > common_low ? low : common_low;
        common_high = high < common_high ? high : common_high;
        for (size_t i = row * b->group; i < (row + 1) * b->group; i++) {
            float *s = b->s.scores + i * BN_CHUNK_KEYS;
            l[i] = 0;
            if (low >= high)
                continue;
            if (c->attention_softcap > 0)
                for (size_t key = low - begin; key < high - begin; key++) {
                    const float e = bn_exp(s[key] / c->attention_softcap * 2);
                    s[key] = c->attention_softcap * (1 - 2 / (e + 1));
                }
            m[i] = kernels->max(s + (low - begin), high - low);
            l[i] = kernels->exp_sum(s + (low - begin), high - low, m[i]);
            if (b->type == BN_KV_INT8)
                for (size_t key = low; key < high; key++)
                    s[key - begin] *= b->v_scale[key];
        }
    }
    if (common_low >= common_high)
        common_low = common_high = end;          /* nothing in common: each row on its own */
    for (size_t row = 0; row < b->rows; row++) { /* before what all see */
        const size_t low = first_key(c, b->position + row), high = b->position + row + 1;
        const size_t from = low > begin ? low : begin, seen = high < end ? high : end;
        const size_t to = seen < common_low ? seen : common_low;
        if (from < to)
            weigh(b, o + row * b->group * E,
                  b->s.scores + row * b->group * BN_CHUNK_KEYS + (from - begin), b->group, from,
                  to - from);
    }
    weigh(b, o, b->s.scores + (common_low - begin), n_q, common_low, common_high - common_low);
    for (size_t row = 0; row < b->rows; row++) { /* and after */
        const size_t high = b->position + row + 1, to = high < end ? high : end;
        if (common_high < to)
            weigh(b, o + row * b->group * E,
                  b->s.scores + row * b->group * BN_CHUNK_KEYS + (common_high - begin), b->group,
                  common_high, to - common_high);
    }
}

/* Merge a chunk's (m2, l2, o2) into the running (m, l, o); l == 0 means nothing seen yet. */
static void merge(float *m, float *l, float *o, float m2, float l2, const float *o2, size_t E) {
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

static void finish(float *out, const float *o, float l, size_t E) {
    const float r = 1 / l;
    for (size_t d = 0; d < E; d++)
        out[d] = o[d] * r;
}

/* --- splitting the work --- */

typedef struct pass {
    const bn_model *m;
    bn_workspace *w;
    size_t rows;
    uint32_t layer;
} pass;

/* Rows of the block that begins with `row`: consecutive positions of one text. */
static size_t count_rows(const pass *p, size_t row) {
    const bn_row *first = &p->w->rows[row];
    size_t n = 1;
    while (n < block_rows(&p->m->config) && row + n < p->rows && first[n].cache == first->cache &&
           first[n].position == first->position + (int32_t)n)
        n++;
    return n;
}

/* Where query i of KV head g goes. */
static float *output(const pass *p, size_t row, size_t g, size_t i) {
    const bn_config *c = &p->m->config;
    return p->w->h + row * p->w->wide + (g * group_size(c) + i) * c->head_dim;
}

/* The block of `rows` rows from `row` on for KV head g, with its queries gathered. */
static block make_block(const pass *p, size_t row, size_t rows, size_t g, int32_t thread) {
    const bn_config *c = &p->m->config;
    const size_t E = c->head_dim, group = group_size(c), n = rows * group;
    const bn_cache *cache = p->w->rows[row].cache;
    const size_t head = p->layer * c->n_kv_heads + g;
    block b = {.m = p->m,
               .k = cache->k + head * cache->head_stride,
               .v = cache->v + head * cache->head_stride,
               .type = cache->type,
               .rows = rows,
               .group = group,
               .position = (size_t)p->w->rows[row].position,
               .s = scratch_of(p->w, thread, n, E)};
    for (size_t i = 0; i < rows; i++) {
        const float *from =
            p->w->qkv + (row + i) * (c->n_heads + 2 * c->n_kv_heads) * E + g * group * E;
        for (size_t d = 0; d < group * E; d++)
            b.s.q[i * group * E + d] = from[d] * c->attention_scale;
    }
    if (b.type == BN_KV_INT8) {
        const size_t stride = bn_q_row(E);
        int32_t sum;
        b.k_scale = cache->k_scale + head * cache->slots;
        b.v_scale = cache->v_scale + head * cache->slots;
        for (size_t i = 0; i < n; i++)
            b.s.q_scale[i] =
                1 / p->m->kernels.quantize(b.s.codes + i * stride, &sum, b.s.q + i * E, E, stride);
    }
    return b;
}

/* One block, its context split. */
typedef struct chunks {
    size_t low, n;    /* first chunk; chunks */
    size_t keys;      /* that the last row sees or passes by */
    float *m, *l, *o; /* [n][G][rows·group], and o [E] of each */
} chunks;

static chunks chunks_of(const pass *p) {
    const bn_config *c = &p->m->config;
    const size_t position = (size_t)p->w->rows[0].position;
    chunks s = {.low = first_key(c, position) / BN_CHUNK_KEYS, .keys = position + p->rows};
    s.n = (s.keys + BN_CHUNK_KEYS - 1) / BN_CHUNK_KEYS - s.low;
    s.m = p->w->partial;
    s.l = s.m + s.n * p->rows * c->n_heads;
    s.o = s.l + s.n * p->rows * c->n_heads;
    return s;
}

/* The rows' queries of KV head g, when all its chunks are there. */
static void merge_chunks(const pass *p, const chunks *s, size_t g) {
    const bn_config *c = &p->m->config;
    const size_t E = c->head_dim, group = group_size(c), n = p->rows * group;
    for (size_t i = 0; i < n; i++) {
        const size_t sum = g * n + i;
        for (size_t chunk = 1; chunk < s->n; chunk++) {
            const size_t at = (chunk * c->n_kv_heads + g) * n + i;
            merge(&s->m[sum], &s->l[sum], s->o + sum * E, s->m[at], s->l[at], s->o + at * E, E);
        }
        finish(output(p, i / group, g, i % group), s->o + sum * E, s->l[sum], E);
    }
}

/* Thread t takes a share of (KV head, chunk) pairs; who ends the last chunk of a head merges. */
static void split_keys(void *context, int32_t thread, int32_t n_threads) {
    const pass *p = context;
    const bn_config *c = &p->m->config;
    const size_t G = c->n_kv_heads, n = p->rows * group_size(c);
    const chunks s = chunks_of(p);
    size_t first, last;
    block b = {0};
    bn_share(s.n * G, thread, n_threads, &first, &last);
    for (size_t item = first; item < last; item++) {
        const size_t g = item / s.n, chunk = item % s.n, at = (chunk * G + g) * n;
        const size_t begin = (s.low + chunk) * BN_CHUNK_KEYS;
        const size_t end = begin + BN_CHUNK_KEYS < s.keys ? begin + BN_CHUNK_KEYS : s.keys;
        if (item == first || chunk == 0)
            b = make_block(p, 0, p->rows, g, thread);
        attend_chunk(&b, begin, end, s.m + at, s.l + at, s.o + at * c->head_dim);
        if (atomic_fetch_add(&p->w->chunks_done[g], 1) + 1 == s.n)
            merge_chunks(p, &s, g);
    }
}

/* All that the rows of a block see, chunk by chunk. */
static void attend_block(const pass *p, size_t row, size_t rows, size_t g, int32_t thread) {
    const bn_config *c = &p->m->config;
    const size_t E = c->head_dim, group = group_size(c), n = rows * group;
    const block b = make_block(p, row, rows, g, thread);
    const scratch *s = &b.s;
    const size_t keys = b.position + rows;
    memset(s->l_sum, 0, n * sizeof *s->l_sum);
    for (size_t begin = first_key(c, b.position) / BN_CHUNK_KEYS * BN_CHUNK_KEYS; begin < keys;
         begin += BN_CHUNK_KEYS) {
        const size_t end = begin + BN_CHUNK_KEYS < keys ? begin + BN_CHUNK_KEYS : keys;
        attend_chunk(&b, begin, end, s->m, s->l, s->o);
        for (size_t i = 0; i < n; i++)
            merge(&s->m_sum[i], &s->l_sum[i], s->sum + i * E, s->m[i], s->l[i], s->o + i * E, E);
    }
    for (size_t i = 0; i < n; i++)
        finish(output(p, row + i / group, g, i % group), s->sum + i * E, s->l_sum[i], E);
}

/* Many blocks: (block, KV head) pairs are dealt out in turn, as later rows see more keys. */
static void split_rows(void *context, int32_t thread, int32_t n_threads) {
    const pass *p = context;
    size_t item = 0;
    for (size_t row = 0, rows; row < p->rows; row += rows) {
        rows = count_rows(p, row);
        for (size_t g = 0; g < p->m->config.n_kv_heads; g++, item++)
            if (item % (size_t)n_threads == (size_t)thread)
                attend_block(p, row, rows, g, thread);
    }
}

void bn_attention(const bn_model *m, bn_workspace *w, size_t rows, uint32_t layer) {
    pass p = {m, w, rows, layer};
    if (count_rows(&p, 0) == rows) {
        for (size_t g = 0; g < m->config.n_kv_heads; g++)
            atomic_init(&w->chunks_done[g], 0);
        bn_pool_run(m->pool, split_keys, &p);
    } else {
        bn_pool_run(m->pool, split_rows, &p);
    }
}
