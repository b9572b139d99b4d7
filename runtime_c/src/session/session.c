/* SPDX-License-Identifier: MIT
 *
 * session.c: one text: its tokens, cache, logits and seed.
 */
#include "session.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"
#include "sampler.h"
#include "system/memory.h"
#include "system/pages.h"
#include "turn.h"

enum { DEFAULT_BATCH = 128, MAX_BATCH = 4096 };

/* Set the pointers into s->memory; with base NULL compute only the size. */
static void lay_out(bn_session *s, uint8_t *base) {
    const bn_config *c = &s->stack->config;
    const size_t D = c->dim, V = c->vocab_size, C = (size_t)s->n_ctx;
    bn_layout l = {.base = base};
    s->blocks = bn_piece(&l, bn_cache_blocks(&s->cache), sizeof *s->blocks);
    s->hidden = bn_piece(&l, D, sizeof *s->hidden);
    s->pool = bn_piece(&l, D, sizeof *s->pool);
    s->logits = bn_piece(&l, V, sizeof *s->logits);
    s->listed = bn_piece(&l, V, sizeof *s->listed);
    s->tokens = bn_piece(&l, C, sizeof *s->tokens);
    s->digests = bn_piece(&l, C, sizeof *s->digests);
    s->backlog = bn_piece(&l, s->stack->draft ? (BN_BACKLOG + 2) * D : 0, sizeof *s->backlog);
    s->sampler_scratch = bn_piece(&l, 1, bn_sample_scratch_size(c->vocab_size));
    s->memory_size = l.used;
}

/* Set up a session, without allocating memory. */
static bn_status plan(bn_model *model, const bn_session_options *o, bn_session *s) {
    if (model && !bn_reads(model))
        return BN_ERR_INPUT;
    if (!model || o->n_ctx < 0 || (uint32_t)o->n_ctx > model->stack.config.max_context ||
        o->batch < 0 || o->batch > MAX_BATCH || o->kv_type < 0 || o->kv_type >= BN_KV_TYPES ||
        o->adapter < 0 || o->adapter > model->n_added || o->no_draft < 0 || o->no_draft > 1)
        return BN_ERR_ARGUMENT;
    *s = (bn_session){.model = model, .stack = &model->stack, .cache.type = o->kv_type};
    s->adapter = o->adapter;
    s->drafted = o->no_draft ? -1 : 0;
    s->n_ctx = o->n_ctx ? o->n_ctx : (int32_t)s->stack->config.max_context;
    s->batch = bn_smaller(o->batch ? o->batch : DEFAULT_BATCH, s->n_ctx);
    bn_cache_plan(&s->cache, s->stack, (size_t)s->n_ctx, (size_t)s->batch);
    lay_out(s, NULL);
    return BN_OK;
}

static bn_room room_for(const bn_session *s) {
    return (bn_room){.batch = (size_t)s->batch, .n_ctx = (size_t)s->n_ctx};
}

/* Its own memory, and the growth that its model's workspace, with this much room, needs. */
static uint64_t needed(const bn_session *s, bn_room have) {
    const uint64_t cache = bn_cache_size(&s->cache), most = s->model->budget.most;
    return bn_session_bytes(s) - (most && most < cache ? cache - most : 0) +
           bn_turn_growth(s->model, have, room_for(s));
}

bn_status bn_session_plan(const bn_model *model, const bn_session_options *options,
                          bn_session_memory *memory) {
    bn_session_options o = options ? *options : (bn_session_options){0};
    bn_model *m = (bn_model *)(uintptr_t)model; /* not modified */
    bn_session s;
    const bn_status status = memory ? plan(m, &o, &s) : BN_ERR_ARGUMENT;
    if (status)
        return status;
    const bn_room have = bn_turn_room(m);
    const bn_memory left = bn_memory_left("", BN_MEMORY_OWN, UINT64_MAX);
    *memory = (bn_session_memory){
        .needed = needed(&s, have), .available = left.bytes, .limited_by = left.limit};
    int32_t most = (int32_t)s.stack->config.max_context;
    while (memory->largest_n_ctx < most) { /* binary search in [largest_n_ctx, most] */
        o.n_ctx = most - (most - memory->largest_n_ctx) / 2;
        if (plan(m, &o, &s) == BN_OK && needed(&s, have) <= left.bytes)
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
    const uint64_t bytes = needed(&planned, bn_turn_room(model));
    if (bn_memory_left("", BN_MEMORY_OWN, bytes).bytes < bytes)
        return BN_ERR_MEMORY;
    bn_session *s = malloc(sizeof *s);
    if (!s)
        return BN_ERR_MEMORY;
    *s = planned;
    s->memory = bn_pages_grow(s->memory_size + BN_PIECE_ALIGN, 0);
    if (s->memory)
        lay_out(s, (uint8_t *)s->memory + BN_PIECE_ALIGN - (uintptr_t)s->memory % BN_PIECE_ALIGN);
    if (!s->memory || !bn_cache_begin(&s->cache, s->blocks, &model->budget) ||
        bn_turn_join(model, room_for(s)) != BN_OK) {
        if (s->memory)
            bn_cache_end(&s->cache);
        bn_pages_free(s->memory, s->memory_size + BN_PIECE_ALIGN);
        free(s);
        return BN_ERR_MEMORY;
    }
    bn_model_join(model);
    *session = s;
    return BN_OK;
}

void bn_session_free(bn_session *s) {
    if (!s)
        return;
    bn_turn_leave(s->model);
    bn_cache_end(&s->cache);
    bn_model_leave(s->model);
    bn_pages_free(s->memory, s->memory_size + BN_PIECE_ALIGN);
    free(s);
}

bn_status bn_session_fork(const bn_session *session, bn_session **copy) {
    if (!session || !copy)
        return BN_ERR_ARGUMENT;
    const bn_session_options o = {.n_ctx = session->n_ctx,
                                  .kv_type = session->cache.type,
                                  .batch = session->batch,
                                  .adapter = session->adapter};
    bn_session *s;
    const bn_status status = bn_session_new(session->model, &o, &s);
    if (status)
        return status;
    s->position = session->position;
    s->ready = session->ready;
    s->seed = session->seed;
    memcpy(s->tokens, session->tokens, (size_t)s->position * sizeof *s->tokens);
    memcpy(s->digests, session->digests, (size_t)s->position * sizeof *s->digests);
    s->pooled = session->pooled;
    s->pooling = session->pooling;
    s->drafted = session->drafted;
    s->pending = session->pending;
    s->draft_stats = session->draft_stats;
    s->repeats = session->repeats;
    if (s->pending > 0)
        memcpy(s->backlog, session->backlog,
               (size_t)s->pending * s->stack->config.dim * sizeof *s->backlog);
    memcpy(s->hidden, session->hidden, s->stack->config.dim * sizeof *s->hidden);
    memcpy(s->pool, session->pool, s->stack->config.dim * sizeof *s->pool);
    memcpy(s->logits, session->logits, s->stack->config.vocab_size * sizeof *s->logits);
    bn_cache_share(&session->cache, &s->cache);
    *copy = s;
    return BN_OK;
}

bn_status bn_session_cut(bn_session *s, int32_t n) {
    if (n > 0 && n < s->position && n < bn_session_rewind_least(s))
        return BN_ERR_STATE;
    bn_cache_forget(&s->cache, (size_t)n);
    if (n < s->position) {
        if (n <= s->drafted + s->pending) { /* otherwise the draft was behind anyway */
            s->drafted = bn_smaller(s->drafted, n);
            s->pending = n - s->drafted;
        }
        s->position = n;
        s->draft_stats = n > 0 ? s->draft_stats : (bn_draft_stats){0};
        s->repeats = n > 0 ? s->repeats : (bn_repeats){0};
        s->pooled = 0;
        s->ready = BN_READY_NOTHING;
    }
    return BN_OK;
}

bn_status bn_session_rewind(bn_session *s, int32_t n) {
    if (!s || n < 0 || n > s->position)
        return BN_ERR_ARGUMENT;
    const bn_status status = bn_session_cut(s, n);
    if (!status)
        atomic_store(&s->cancelled, 0);
    return status;
}

int32_t bn_session_rewind_least(const bn_session *s) {
    return s ? (int32_t)bn_cache_least(&s->cache, &s->stack->config) : 0;
}

int32_t bn_session_position(const bn_session *s) {
    return s ? s->position : 0;
}

int32_t bn_session_kv_type(const bn_session *s) {
    return s ? s->cache.type : 0;
}

int32_t bn_session_adapter(const bn_session *s) {
    return s ? s->adapter : 0;
}

int32_t bn_session_context(const bn_session *s) {
    return s ? s->n_ctx : 0;
}

uint64_t bn_session_bytes(const bn_session *s) {
    return s ? bn_cache_size(&s->cache) + s->memory_size + sizeof *s : 0;
}

uint64_t bn_session_skipped(const bn_session *s) {
    return s ? s->skipped : 0;
}

const int32_t *bn_session_tokens(const bn_session *s) {
    return s ? s->tokens : NULL;
}

const uint64_t *bn_session_digests(const bn_session *s) {
    return s ? s->digests : NULL;
}

void bn_session_seed(bn_session *s, uint64_t seed) {
    if (s)
        s->seed = seed;
}

void bn_session_cancel(bn_session *s) {
    if (s)
        atomic_store(&s->cancelled, 1);
}

int32_t bn_session_cancelled(const bn_session *s) {
    return s ? atomic_load(&s->cancelled) : 0;
}

bn_status bn_session_reserve(bn_session *s, int32_t n) {
    if (!s || n < 0)
        return BN_ERR_ARGUMENT;
    if (n > s->n_ctx - s->position)
        return BN_ERR_CONTEXT;
    return bn_cache_prepare(&s->cache, (size_t)s->position, (size_t)n);
}

/* The checks of every call that appends n rows. */
static bn_status check_room(const bn_session *s, int32_t n) {
    if (!s || n < 1)
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    if (s->stack->config.mask == BN_MASK_BIDIRECTIONAL && s->position > 0)
        return BN_ERR_STATE;
    return n > s->n_ctx - s->position ? BN_ERR_CONTEXT : BN_OK;
}

bn_status bn_check_tokens(const bn_session *s, const int32_t *tokens, int32_t n) {
    const bn_status status = tokens ? check_room(s, n) : BN_ERR_ARGUMENT;
    if (status)
        return status;
    if (!s->stack->embedding.data)
        return BN_ERR_NO_TABLE;
    for (int32_t i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= s->stack->config.vocab_size)
            return BN_ERR_TOKEN;
    return BN_OK;
}

bn_status bn_check_text(const bn_session *s, const bn_text *t) {
    if (!t->vectors)
        return bn_check_tokens(s, t->tokens, t->n);
    bn_status status = check_room(s, t->n);
    const float *vector = t->vectors;
    for (int32_t i = 0; i < t->n && !status; i++) {
        if (t->tokens && t->tokens[i] != BN_NO_TOKEN) {
            status = bn_check_tokens(s, t->tokens + i, 1);
            continue;
        }
        for (const float *end = vector + s->stack->config.dim; vector < end && !status; vector++)
            status = isfinite(*vector) ? BN_OK : BN_ERR_NUMERIC;
    }
    return status;
}
