/* SPDX-License-Identifier: MIT
 *
 * session.c: one text: its tokens, cache, logits and random state.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
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
    const size_t element = s->cache.type == BN_KV_F32 ? 4 : 2;
    const size_t logits = align((size_t)c->vocab_size * sizeof(float));
    const size_t scores = align((size_t)s->score_rows * c->vocab_size * sizeof(float));
    const size_t tokens = align((size_t)s->n_ctx * sizeof(int32_t));
    const size_t sampler = align(bn_sample_scratch_size(c->vocab_size));
    size_t kv;
    s->cache.head_stride = align(slots * c->head_dim * element);
    s->cache.layer_stride = s->cache.head_stride * c->n_kv_heads;
    if (__builtin_mul_overflow(s->cache.layer_stride, (size_t)c->n_layers, &kv) ||
        kv > SIZE_MAX / 4)
        return 0;
    s->memory_size = 2 * kv + logits + scores + tokens + sampler;
    if (base) {
        s->cache.k = base;
        s->cache.v = base + kv;
        base += 2 * kv;
        s->logits = (float *)(void *)base;
        s->score_logits = (float *)(void *)(base + logits);
        s->tokens = (int32_t *)(void *)(base + logits + scores);
        s->sampler_scratch = base + logits + scores + tokens;
    }
    return 1;
}

bn_status bn_session_new(bn_model *model, const bn_session_options *options, bn_session **session) {
    const bn_session_options defaults = {0};
    const bn_session_options *o = options ? options : &defaults;
    if (!model || !session || o->n_ctx < 0 || (uint32_t)o->n_ctx > model->config.max_context ||
        o->batch < 0 || o->batch > MAX_BATCH ||
        (o->kv_type != BN_KV_F16 && o->kv_type != BN_KV_F32))
        return BN_ERR_ARGUMENT;
    bn_session *s = calloc(1, sizeof *s);
    if (!s)
        return BN_ERR_MEMORY;
    s->model = model;
    s->n_ctx = o->n_ctx ? o->n_ctx : (int32_t)model->config.max_context;
    s->cache.type = o->kv_type;
    int32_t batch = o->batch ? o->batch : DEFAULT_BATCH;
    batch = batch < s->n_ctx ? batch : s->n_ctx;
    const int32_t rows = (int32_t)(SCORE_FLOATS / model->config.vocab_size);
    s->score_rows = rows < 1 ? 1 : rows < batch ? rows : batch;
    atomic_init(&s->cancel, 0);
    /* calloc: memory of tokens that never come is never touched */
    if (!lay_out(s, NULL) || !(s->memory = calloc(1, s->memory_size + ALIGN)) ||
        bn_workspace_new(model, (size_t)batch, (size_t)s->n_ctx, &s->work) != BN_OK) {
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
    const size_t slots = ((size_t)from->position + BN_LANES - 1) / BN_LANES * BN_LANES;
    const size_t bytes = slots * c->head_dim * (from->cache.type == BN_KV_F32 ? 4 : 2);
    for (size_t head = 0; head < (size_t)c->n_layers * c->n_kv_heads; head++) {
        const size_t at = head * from->cache.head_stride;
        memcpy(to->cache.k + at, from->cache.k + at, bytes);
        memcpy(to->cache.v + at, from->cache.v + at, bytes);
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
    s->has_logits = session->has_logits;
    s->rng = session->rng;
    memcpy(s->tokens, session->tokens, (size_t)s->position * sizeof *s->tokens);
    memcpy(s->logits, session->logits, s->model->config.vocab_size * sizeof *s->logits);
    copy_cache(session, s);
    *copy = s;
    return BN_OK;
}

bn_status bn_session_rewind(bn_session *s, int32_t n) {
    if (!s || n < 0 || n > s->position)
        return BN_ERR_ARGUMENT;
    s->position = n;
    s->has_logits = 0;
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

const int32_t *bn_session_tokens(const bn_session *s) {
    return s ? s->tokens : NULL;
}

const float *bn_session_logits(const bn_session *s) {
    return s && s->has_logits ? s->logits : NULL;
}

void bn_session_seed(bn_session *s, uint64_t seed) {
    if (s)
        s->rng = seed;
}

void bn_session_cancel(bn_session *s) {
    if (s)
        atomic_store(&s->cancel, 1);
}

bn_status bn_session_sample(bn_session *s, const bn_sampler *sampler, int32_t *token) {
    if (!s || !token)
        return BN_ERR_ARGUMENT;
    if (!s->has_logits)
        return BN_ERR_STATE;
    return bn_sample(sampler, s->logits, s->model->config.vocab_size, s->tokens, s->position,
                     &s->rng, s->sampler_scratch, &s->model->kernels, token);
}

/* --- computing tokens --- */

static bn_status check_tokens(const bn_session *s, const int32_t *tokens, int32_t n) {
    if (!s || !tokens || n < 1)
        return BN_ERR_ARGUMENT;
    if (n > s->n_ctx - s->position)
        return BN_ERR_CONTEXT;
    for (int32_t i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= s->model->config.vocab_size)
            return BN_ERR_TOKEN;
    return BN_OK;
}

/* Run the next n <= batch tokens through the layers; the session then holds them. */
static bn_status forward_block(bn_session *s, const int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        s->work.rows[i] = (bn_row){&s->cache, tokens[i], s->position + i};
    const bn_status status = bn_forward(s->model, &s->work, (size_t)n);
    if (status)
        return status;
    memcpy(s->tokens + s->position, tokens, (size_t)n * sizeof *tokens);
    s->position += n;
    return BN_OK;
}

typedef bn_status (*block_done)(bn_session *s, int32_t start, int32_t n, int32_t total,
                                void *context);

/* Cut n tokens into blocks; call done after each, with the workspace still holding its rows. */
static bn_status run_blocks(bn_session *s, const int32_t *tokens, int32_t n, block_done done,
                            void *context) {
    bn_status status = BN_OK;
    atomic_store(&s->cancel, 0);
    s->has_logits = 0;
    bn_pool_lock(s->model->pool);
    for (int32_t i = 0, block; i < n && !status; i += block) {
        block = n - i < (int32_t)s->work.batch ? n - i : (int32_t)s->work.batch;
        status = atomic_load(&s->cancel) ? BN_ERR_CANCELLED : forward_block(s, tokens + i, block);
        if (!status)
            status = done(s, i, block, n, context);
    }
    bn_pool_unlock(s->model->pool);
    return status;
}

typedef struct append_context {
    bn_logits logits;
    float *out;
} append_context;

static bn_status append_done(bn_session *s, int32_t start, int32_t n, int32_t total,
                             void *context) {
    const append_context *a = context;
    const size_t V = s->model->config.vocab_size;
    const int last = start + n == total;
    bn_status status = BN_OK;
    if (a->logits == BN_LOGITS_ALL && a->out) {
        float *out = a->out + (size_t)start * V;
        status = bn_head(s->model, &s->work, 0, (size_t)n, out);
        if (last)
            memcpy(s->logits, out + (size_t)(n - 1) * V, V * sizeof *out);
    } else if (a->logits != BN_LOGITS_NONE && last) {
        status = bn_head(s->model, &s->work, (size_t)n - 1, 1, s->logits);
        if (a->out)
            memcpy(a->out, s->logits, V * sizeof *s->logits);
    }
    s->has_logits = !status && last && a->logits != BN_LOGITS_NONE;
    return status;
}

bn_status bn_session_append(bn_session *s, const int32_t *tokens, int32_t n, bn_logits logits,
                            float *out) {
    append_context context = {logits, out};
    const bn_status status = check_tokens(s, tokens, n);
    if (status)
        return status;
    if (logits != BN_LOGITS_NONE && logits != BN_LOGITS_LAST && logits != BN_LOGITS_ALL)
        return BN_ERR_ARGUMENT;
    return run_blocks(s, tokens, n, append_done, &context);
}

/* log softmax(logits)[token]; the sum in double, in pieces that fit the stack. */
static float log_probability(const bn_kernels *k, const float *logits, size_t V, int32_t token) {
    const float top = k->max(logits, V);
    double sum = 0;
    float piece[256];
    for (size_t i = 0; i < V; i += 256) {
        const size_t n = V - i < 256 ? V - i : 256;
        memcpy(piece, logits + i, n * sizeof *piece);
        sum += (double)k->exp_sum(piece, n, top);
    }
    return (float)((double)logits[token] - (double)top - bn_log(sum));
}

typedef struct score_context {
    const int32_t *tokens;
    float *out;
} score_context;

static bn_status score_done(bn_session *s, int32_t start, int32_t n, int32_t total, void *context) {
    const score_context *c = context;
    const size_t V = s->model->config.vocab_size;
    for (int32_t i = 0, rows; i < n; i += rows) {
        rows = n - i < s->score_rows ? n - i : s->score_rows;
        const bn_status status =
            bn_head(s->model, &s->work, (size_t)i, (size_t)rows, s->score_logits);
        if (status)
            return status;
        for (int32_t r = 0; r < rows && start + i + r + 1 < total; r++)
            c->out[start + i + r + 1] =
                log_probability(&s->model->kernels, s->score_logits + (size_t)r * V, V,
                                c->tokens[start + i + r + 1]);
        if (start + i + rows == total)
            memcpy(s->logits, s->score_logits + (size_t)(rows - 1) * V, V * sizeof *s->logits);
    }
    s->has_logits = start + n == total;
    return BN_OK;
}

bn_status bn_session_score(bn_session *s, const int32_t *tokens, int32_t n, float *out) {
    const bn_status status = check_tokens(s, tokens, n);
    if (status)
        return status;
    if (!out || (s->position > 0 && !s->has_logits))
        return out ? BN_ERR_STATE : BN_ERR_ARGUMENT;
    out[0] = s->position ? log_probability(&s->model->kernels, s->logits,
                                           s->model->config.vocab_size, tokens[0])
                         : NAN;
    score_context context = {tokens, out};
    return run_blocks(s, tokens, n, score_done, &context);
}
