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

/* A thread's scratch: queries [n][E], chunk outputs [n][E], running outputs [n][E],
 * scores [n][chunk], and m, l per query. */
size_t bn_attend_floats(const bn_config *c) {
    const size_t n = block_rows(c) * group_size(c);
    return n * (3 * (size_t)c->head_dim + BN_CHUNK_KEYS + 4);
}

/* --- one chunk of keys --- */

/* Queries of `rows` consecutive positions of one text, for one KV head. */
typedef struct block {
    const bn_model *m;
    const uint8_t *k, *v; /* of the KV head: tiles and rows from position 0 */
    int32_t type;
    size_t rows, group; /* rows · group queries, row by row */
    size_t position;    /* of the first row */
    const float *q;     /* [rows·group][E], scaled */
    float *scores;      /* [rows·group][BN_CHUNK_KEYS] */
} block;

static size_t first_key(const bn_config *c, size_t position) {
    return c->sliding_window && position + 1 > c->sliding_window ? position + 1 - c->sliding_window
                                                                 : 0;
}

static void weigh(const block *b, float *o, const float *p, size_t n_q, size_t key, size_t n) {
    const size_t E = b->m->config.head_dim;
    if (n == 0)
        return;
    if (b->type == BN_KV_F32)
        b->m->kernels.pv_f32(o, p, BN_CHUNK_KEYS, n_q, (const float *)b->v + key * E, E, n);
    else
        b->m->kernels.pv_f16(o, p, BN_CHUNK_KEYS, n_q, (const uint16_t *)b->v + key * E, E, n);
}

/* Fill m, l and o of every query for keys [begin, end) of one chunk; rows that see none of them
 * get l = 0. */
static void attend_chunk(const block *b, size_t begin, size_t end, float *m, float *l, float *o) {
    const bn_config *c = &b->m->config;
    const bn_kernels *kernels = &b->m->kernels;
    const size_t E = c->head_dim, n_q = b->rows * b->group;
    const size_t tiles = (end - begin + BN_LANES - 1) / BN_LANES;

    if (b->type == BN_KV_F32)
        kernels->qk_f32(b->scores, BN_CHUNK_KEYS, b->q, n_q, (const float *)b->k + begin * E, E,
                        tiles);
    else
        kernels->qk_f16(b->scores, BN_CHUNK_KEYS, b->q, n_q, (const uint16_t *)b->k + begin * E, E,
                        tiles);
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
            float *s = b->scores + i * BN_CHUNK_KEYS;
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
                  b->scores + row * b->group * BN_CHUNK_KEYS + (from - begin), b->group, from,
                  to - from);
    }
    weigh(b, o, b->scores + (common_low - begin), n_q, common_low, common_high - common_low);
    for (size_t row = 0; row < b->rows; row++) { /* and after */
        const size_t high = b->position + row + 1, to = high < end ? high : end;
        if (common_high < to)
            weigh(b, o + row * b->group * E,
                  b->scores + row * b->group * BN_CHUNK_KEYS + (common_high - begin), b->group,
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

/* The block of `rows` rows from `row` on for KV head g, with its queries gathered into q. */
static block make_block(const pass *p, size_t row, size_t rows, size_t g, float *q, float *scores) {
    const bn_config *c = &p->m->config;
    const size_t E = c->head_dim, group = group_size(c);
    const bn_row *first = &p->w->rows[row];
    const size_t head = p->layer * first->cache->layer_stride + g * first->cache->head_stride;
    for (size_t i = 0; i < rows; i++) {
        const float *from =
            p->w->qkv + (row + i) * (c->n_heads + 2 * c->n_kv_heads) * E + g * group * E;
        for (size_t d = 0; d < group * E; d++)
            q[i * group * E + d] = from[d] * c->attention_scale;
    }
    return (block){.m = p->m,
                   .k = first->cache->k + head,
                   .v = first->cache->v + head,
                   .type = first->cache->type,
                   .rows = rows,
                   .group = group,
                   .position = (size_t)first->position,
                   .q = q,
                   .scores = scores};
}

/* One row, its context split: thread t takes a share of (chunk, KV head) pairs. */
static void split_keys(void *context, int32_t thread, int32_t n_threads) {
    const pass *p = context;
    const bn_config *c = &p->m->config;
    const size_t E = c->head_dim, G = c->n_kv_heads, H = c->n_heads, group = group_size(c);
    const size_t keys = (size_t)p->w->rows[0].position + 1;
    const size_t low = first_key(c, keys - 1) / BN_CHUNK_KEYS;
    const size_t chunks = (keys + BN_CHUNK_KEYS - 1) / BN_CHUNK_KEYS - low;
    float *q = p->w->attend + (size_t)thread * p->w->attend_stride;
    float *o = q + group * E, *scores = o + group * E, *m = scores + group * BN_CHUNK_KEYS;
    size_t first, last;
    bn_share(chunks * G, thread, n_threads, &first, &last);
    for (size_t item = first; item < last; item++) {
        const size_t g = item / chunks, chunk = item % chunks;
        const size_t begin = (low + chunk) * BN_CHUNK_KEYS;
        const size_t end = begin + BN_CHUNK_KEYS < keys ? begin + BN_CHUNK_KEYS : keys;
        const block b = make_block(p, 0, 1, g, q, scores);
        attend_chunk(&b, begin, end, m, m + group, o);
        for (size_t i = 0; i < group; i++) {
            float *part = p->w->partial + (chunk * H + g * group + i) * (E + 2);
            part[0] = m[i], part[1] = m[group + i];
            memcpy(part + 2, o + i * E, E * sizeof *o);
        }
    }
}

static void merge_split(const pass *p) {
    const bn_config *c = &p->m->config;
    const size_t E = c->head_dim, H = c->n_heads;
    const size_t keys = (size_t)p->w->rows[0].position + 1;
    const size_t low = first_key(c, keys - 1) / BN_CHUNK_KEYS;
    const size_t chunks = (keys + BN_CHUNK_KEYS - 1) / BN_CHUNK_KEYS - low;
    for (size_t h = 0; h < H; h++) {
        float *sum = p->w->partial + h * (E + 2);
        for (size_t chunk = 1; chunk < chunks; chunk++) {
            const float *part = sum + chunk * H * (E + 2);
            merge(&sum[0], &sum[1], sum + 2, part[0], part[1], part + 2, E);
        }
        finish(p->w->h + h * E, sum + 2, sum[1], E);
    }
}

/* Many rows: thread t takes a share of (block of rows, KV head) pairs. Rows of a block are
 * consecutive positions of one text. */
static void attend_block(const pass *p, size_t row, size_t rows, size_t g, float *scratch) {
    const bn_config *c = &p->m->config;
    const size_t E = c->head_dim, group = group_size(c), n = rows * group;
    float *q = scratch, *o = q + n * E, *sum = o + n * E, *scores = sum + n * E;
    float *m = scores + n * BN_CHUNK_KEYS, *l = m + n, *m_sum = l + n, *l_sum = m_sum + n;
    const block b = make_block(p, row, rows, g, q, scores);
    const size_t keys = b.position + rows;
    memset(l_sum, 0, n * sizeof *l_sum);
    for (size_t begin = first_key(c, b.position) / BN_CHUNK_KEYS * BN_CHUNK_KEYS; begin < keys;
         begin += BN_CHUNK_KEYS) {
        attend_chunk(&b, begin, begin + BN_CHUNK_KEYS < keys ? begin + BN_CHUNK_KEYS : keys, m, l,
                     o);
        for (size_t i = 0; i < n; i++)
            merge(&m_sum[i], &l_sum[i], sum + i * E, m[i], l[i], o + i * E, E);
    }
    for (size_t i = 0; i < n; i++)
        finish(p->w->h + (row + i / group) * p->w->wide + (g * group + i % group) * E, sum + i * E,
               l_sum[i], E);
}

static void split_rows(void *context, int32_t thread, int32_t n_threads) {
    const pass *p = context;
    const bn_row *r = p->w->rows;
    const size_t G = p->m->config.n_kv_heads, most = block_rows(&p->m->config);
    float *scratch = p->w->attend + (size_t)thread * p->w->attend_stride;
    size_t item = 0; /* dealt out in turn: later rows see more keys than earlier ones */
    for (size_t row = 0, rows; row < p->rows; row += rows) {
        for (rows = 1; rows < most && row + rows < p->rows; rows++)
            if (r[row + rows].cache != r[row].cache ||
                r[row + rows].position != r[row].position + (int32_t)rows)
                break;
        for (size_t g = 0; g < G; g++, item++)
            if (item % (size_t)n_threads == (size_t)thread)
                attend_block(p, row, rows, g, scratch);
    }
}

void bn_attention(const bn_model *m, bn_workspace *w, size_t rows, uint32_t layer) {
    pass p = {m, w, rows, layer};
    if (rows == 1) {
        bn_pool_run(m->pool, split_keys, &p);
        merge_split(&p);
    } else {
        bn_pool_run(m->pool, split_rows, &p);
    }
}
