/* SPDX-License-Identifier: MIT
 *
 * embed.c: one vector for a whole text: its hidden states after the final norm, pooled, of length
 * 1. A mean adds them up token by token, so that no cut of the text changes a bit.
 */
#include <math.h>
#include <string.h>

#include "internal.h"

/* Some texts, and how much of them is computed. */
typedef struct texts {
    bn_session *const *sessions;
    const int32_t *const *tokens;
    const int32_t *n_tokens;
    int32_t n, text, at; /* the next token is tokens[text][at] */
} texts;

static void next(texts *t) {
    if (++t->at == t->n_tokens[t->text])
        t->text++, t->at = 0;
}

/* The token of this row is computed: it goes into its session and into its pool. */
static bn_status take_row(const texts *t, const float *x, float *h) {
    bn_session *s = t->sessions[t->text];
    const bn_model *m = s->model;
    const size_t D = m->config.dim;
    const int32_t position = s->position++;
    s->tokens[position] = t->tokens[t->text][t->at];
    s->pooled = 0; /* unless all goes well */
    const int last = t->at + 1 == t->n_tokens[t->text];
    if (s->pooling == BN_POOL_MEAN || (s->pooling == BN_POOL_LAST ? last : position == 0)) {
        if (!isfinite(m->kernels.vectors.rms_norm(h, x, m->final_norm, D, m->config.norm_eps)))
            return BN_ERR_NUMERIC;
        if (s->pooling == BN_POOL_MEAN && position > 0)
            for (size_t d = 0; d < D; d++)
                s->pool[d] += h[d];
        else
            memcpy(s->pool, h, D * sizeof *h);
    }
    s->pooled = s->position;
    return BN_OK;
}

static int any_cancelled(const texts *t) {
    int any = 0;
    for (int32_t i = 0; i < t->n; i++)
        any |= bn_session_cancelled(t->sessions[i]);
    return any;
}

/* As many tokens as fit the workspace of the first session. */
static bn_status run_block(texts *t) {
    bn_workspace *w = &t->sessions[0]->work;
    bn_model *m = t->sessions[0]->model;
    texts rows = *t;
    size_t n = 0;
    for (int32_t ahead = 0; rows.text < t->n && n < w->batch; ahead = rows.at ? ahead + 1 : 0) {
        bn_session *s = t->sessions[rows.text];
        w->rows[n++] = (bn_row){&s->cache, t->tokens[rows.text][rows.at], s->position + ahead};
        next(&rows);
    }
    bn_status status = bn_forward(m, w, n);
    for (size_t row = 0; row < n && !status; row++, next(t))
        status = take_row(t, w->x + row * m->config.dim, w->h);
    return status;
}

static bn_status check_text(bn_session *s, const int32_t *tokens, int32_t n, int32_t pooling) {
    const bn_status status = bn_check_tokens(s, tokens, n);
    if (status)
        return status;
    if (pooling < BN_POOL_LAST || pooling > BN_POOL_FIRST)
        return BN_ERR_ARGUMENT;
    return s->position > 0 && (s->pooled != s->position || s->pooling != pooling) ? BN_ERR_STATE
                                                                                  : BN_OK;
}

/* out[dim] = the pool, of length 1 */
static bn_status finish(const bn_session *s, float *out) {
    const size_t D = s->model->config.dim;
    float squares;
    s->model->kernels.products.f32_matmul(&squares, 1, s->pool, 1, D, s->pool, D, 1);
    if (!isfinite(squares))
        return BN_ERR_NUMERIC;
    const float length = fmaxf(sqrtf(squares), 1e-12f);
    for (size_t d = 0; d < D; d++)
        out[d] = s->pool[d] / length;
    return BN_OK;
}

bn_status bn_embed_batch(bn_session *const *sessions, const int32_t *const *tokens,
                         const int32_t *n_tokens, int32_t n, bn_pooling pooling, float *out) {
    BN_STANDARD_FLOATS;
    if (!sessions || !tokens || !n_tokens || n < 1 || !sessions[0])
        return BN_ERR_ARGUMENT;
    const bn_model *m = sessions[0]->model;
    const int32_t kind = pooling ? (int32_t)pooling : (int32_t)m->config.pooling;
    bn_status status = BN_OK;
    for (int32_t i = 0; i < n; i++) {
        if ((status = check_text(sessions[i], tokens[i], n_tokens[i], kind)))
            return status;
        for (int32_t j = 0; j < i; j++)
            if (sessions[j] == sessions[i] || sessions[j]->model != sessions[i]->model)
                return BN_ERR_ARGUMENT;
    }
    for (int32_t i = 0; i < n; i++)
        sessions[i]->pooling = kind, sessions[i]->ready = BN_READY_NOTHING;
    texts t = {sessions, tokens, n_tokens, n, 0, 0};
    while (t.text < n && !status) {
        bn_pool_lock(m->pool);
        status = any_cancelled(&t) ? BN_ERR_CANCELLED : run_block(&t);
        bn_pool_unlock(m->pool);
    }
    for (int32_t i = 0; i < n && !status && out; i++)
        status = finish(sessions[i], out + (size_t)i * m->config.dim);
    return status;
}

bn_status bn_session_embed(bn_session *s, const int32_t *tokens, int32_t n, bn_pooling pooling,
                           float *out) {
    return bn_embed_batch(&s, &tokens, &n, 1, pooling, out);
}
