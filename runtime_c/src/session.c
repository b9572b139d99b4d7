/* SPDX-License-Identifier: MIT
 *
 * session.c: one text: its tokens, cache, logits and random state.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "memory.h"
#include "sampler.h"

enum { ALIGN = 64, SCORE_FLOATS = 1 << 20, DEFAULT_BATCH = 128, MAX_BATCH = 4096 };

static size_t align(size_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

/* Sets the pointers into s->memory; with base NULL only the size. Factors are bounded by
 * FORMAT.md §2, but their product is not: returns 0 on overflow. */
static int lay_out(bn_session *s, uint8_t *base) {
    const bn_config *c = &s->model->config;
    const size_t slots = ((size_t)s->n_ctx + BN_LANES - 1) / BN_LANES * BN_LANES;
    const size_t heads = (size_t)c->n_layers * c->n_kv_heads;
    const size_t hidden = align(c->dim * sizeof(float));
    const size_t logits = align((size_t)c->vocab_size * sizeof(float));
    const size_t scores = align((size_t)s->score_rows * c->vocab_size * sizeof(float));
    const size_t tokens = align((size_t)s->n_ctx * sizeof(int32_t));
    const size_t sampler = align(bn_sample_scratch_size(c->vocab_size));
    const size_t screened = align(c->vocab_size);
    const size_t scales = heads * bn_cache_scale_bytes(s->cache.type, slots); /* <= kv */
    size_t kv;
    s->cache.slots = slots;
    s->cache.head_stride = align(bn_cache_bytes(c, s->cache.type, slots));
    if (__builtin_mul_overflow(s->cache.head_stride, heads, &kv) || kv > SIZE_MAX / 8)
        return 0;
    s->memory_size = 2 * (kv + scales + hidden) + logits + scores + tokens + sampler + screened;
    if (base) {
        s->cache.k = base;
        s->cache.v = base + kv;
        if (scales) {
            s->cache.k_scale = (float *)(void *)(base + 2 * kv);
            s->cache.v_scale = s->cache.k_scale + heads * slots;
        }
        base += 2 * (kv + scales);
        s->hidden = (float *)(void *)base;
        s->pool = (float *)(void *)(base + hidden);
        base += 2 * hidden;
        s->logits = (float *)(void *)base;
        s->score_logits = (float *)(void *)(base + logits);
        s->tokens = (int32_t *)(void *)(base + logits + scores);
        s->sampler_scratch = base + logits + scores + tokens;
        s->screened = base + logits + scores + tokens + sampler;
    }
    return 1;
}

/* Everything about a session but its memory. work.size is what it will be. */
static bn_status plan(bn_model *model, const bn_session_options *o, bn_session *s) {
    if (!model || o->n_ctx < 0 || (uint32_t)o->n_ctx > model->config.max_context || o->batch < 0 ||
        o->batch > MAX_BATCH || o->kv_type < 0 || o->kv_type >= BN_KV_TYPES)
        return BN_ERR_ARGUMENT;
    *s = (bn_session){.model = model, .cache.type = o->kv_type};
    s->n_ctx = o->n_ctx ? o->n_ctx : (int32_t)model->config.max_context;
    int32_t batch = o->batch ? o->batch : DEFAULT_BATCH;
    batch = batch < s->n_ctx ? batch : s->n_ctx;
    const int32_t rows = (int32_t)(SCORE_FLOATS / model->config.vocab_size);
    s->score_rows = rows < 1 ? 1 : rows < batch ? rows : batch;
    s->work.batch = (size_t)batch;
    s->work.size = bn_workspace_size(model, (size_t)batch, (size_t)s->n_ctx);
    return lay_out(s, NULL) ? BN_OK : BN_ERR_MEMORY;
}

bn_status bn_session_plan(const bn_model *model, const bn_session_options *options,
                          bn_session_memory *memory) {
    bn_session_options o = options ? *options : (bn_session_options){0};
    bn_model *m = (bn_model *)(uintptr_t)model; /* which is not changed */
    bn_session s;
    bn_status status = memory ? plan(m, &o, &s) : BN_ERR_ARGUMENT;
    if (status == BN_ERR_ARGUMENT)
        return status;
    const bn_memory left = bn_memory_left("", BN_MEMORY_OWN, UINT64_MAX);
    *memory = (bn_session_memory){.needed = status ? UINT64_MAX : bn_session_bytes(&s),
                                  .available = left.bytes,
                                  .limited_by = left.limit};
    int32_t most = (int32_t)model->config.max_context;
    while (memory->largest_n_ctx < most) { /* lies in [largest_n_ctx, most] */
        o.n_ctx = most - (most - memory->largest_n_ctx) / 2;
        if (plan(m, &o, &s) == BN_OK && bn_session_bytes(&s) <= left.bytes)
            memory->largest_n_ctx = o.n_ctx;
        else
            most = o.n_ctx - 1;
    }
    return BN_OK;
}

bn_status bn_session_new(bn_model *model, const bn_session_options *options, bn_session **session) {
    const bn_session_options defaults = {0};
    bn_session planned;
    const bn_status status =
        session ? plan(model, options ? options : &defaults, &planned) : BN_ERR_ARGUMENT;
    if (status)
        return status;
    const uint64_t bytes = bn_session_bytes(&planned);
    if (bn_memory_left("", BN_MEMORY_OWN, bytes).bytes < bytes)
        return BN_ERR_MEMORY;
    bn_session *s = malloc(sizeof *s);
    if (!s)
        return BN_ERR_MEMORY;
    *s = planned;
    s->work.size = 0;
    /* calloc: memory of tokens that never come is never touched */
    if (!(s->memory = calloc(1, s->memory_size + ALIGN)) ||
        bn_workspace_new(model, s->work.batch, (size_t)s->n_ctx, &s->work) != BN_OK) {
        bn_session_free(s);
        return BN_ERR_MEMORY;
    }
    lay_out(s, (uint8_t *)s->memory + (ALIGN - (uintptr_t)s->memory % ALIGN) % ALIGN);
    *session = s;
    return BN_OK;
}

void bn_session_free(bn_session *s) {
    if (!s)
        return;
    bn_workspace_free(&s->work);
    free(s->memory);
    free(s);
}

/* Keys lie in tiles of 16 positions and values in rows: both have the first n positions of a
 * head in front, if n is rounded up to a tile. */
static void copy_cache(const bn_session *from, bn_session *to) {
    const bn_config *c = &from->model->config;
    const bn_cache *a = &from->cache, *b = &to->cache;
    const size_t slots = ((size_t)from->position + BN_LANES - 1) / BN_LANES * BN_LANES;
    const size_t bytes = bn_cache_bytes(c, a->type, slots);
    const size_t scales = bn_cache_scale_bytes(a->type, slots);
    for (size_t head = 0; head < (size_t)c->n_layers * c->n_kv_heads; head++) {
        const size_t at = head * a->head_stride, scale = head * a->slots;
        memcpy(b->k + at, a->k + at, bytes);
        memcpy(b->v + at, a->v + at, bytes);
        if (scales) {
            memcpy(b->k_scale + scale, a->k_scale + scale, scales);
            memcpy(b->v_scale + scale, a->v_scale + scale, scales);
        }
    }
}

bn_status bn_session_fork(const bn_session *session, bn_session **copy) {
    if (!session || !copy)
        return BN_ERR_ARGUMENT;
    const bn_session_options o = {.n_ctx = session->n_ctx,
                                  .kv_type = session->cache.type,
                                  .batch = (int32_t)session->work.batch};
    bn_session *s;
    const bn_status status = bn_session_new(session->model, &o, &s);
    if (status)
        return status;
    s->position = session->position;
    s->ready = session->ready;
    s->rng = session->rng;
    memcpy(s->tokens, session->tokens, (size_t)s->position * sizeof *s->tokens);
    s->pooled = session->pooled;
    s->pooling = session->pooling;
    memcpy(s->hidden, session->hidden, s->model->config.dim * sizeof *s->hidden);
    memcpy(s->pool, session->pool, s->model->config.dim * sizeof *s->pool);
    memcpy(s->logits, session->logits, s->model->config.vocab_size * sizeof *s->logits);
    copy_cache(session, s);
    *copy = s;
    return BN_OK;
}

bn_status bn_session_rewind(bn_session *s, int32_t n) {
    if (!s || n < 0 || n > s->position)
        return BN_ERR_ARGUMENT;
    if (n < s->position) {
        s->position = n;
        s->pooled = 0;
        s->ready = BN_READY_NOTHING;
    }
    atomic_store(&s->cancelled, 0);
    return BN_OK;
}

int32_t bn_session_position(const bn_session *s) {
    return s ? s->position : 0;
}

int32_t bn_session_context(const bn_session *s) {
    return s ? s->n_ctx : 0;
}

uint64_t bn_session_bytes(const bn_session *s) {
    return s ? s->memory_size + s->work.size + sizeof *s : 0;
}

uint64_t bn_session_skipped(const bn_session *s) {
    uint64_t bytes = 0;
    for (int32_t i = 0; s && i < bn_pool_threads(s->model->pool); i++)
        bytes += s->work.skipped[i];
    return bytes;
}

const int32_t *bn_session_tokens(const bn_session *s) {
    return s ? s->tokens : NULL;
}

void bn_session_seed(bn_session *s, uint64_t seed) {
    if (s)
        s->rng = seed;
}

void bn_session_cancel(bn_session *s) {
    if (s)
        atomic_store(&s->cancelled, 1);
}

int32_t bn_session_cancelled(const bn_session *s) {
    return s ? atomic_load(&s->cancelled) : 0;
}
