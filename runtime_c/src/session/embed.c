/* SPDX-License-Identifier: MIT
 *
 * embed.c: one vector for a whole text: its hidden states after the final norm, pooled, of length
 * 1. A mean adds them up token by token, so that no cut of the text changes a bit.
 */
#include <math.h>

#include "batch.h"
#include "session.h"
#include "workspace.h"

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

/* Whether the vector of the text looks at the state of its next token. */
static int counts(const texts *t, int32_t position) {
    const int32_t pooling = t->sessions[t->text]->pooling;
    const int last = t->at + 1 == t->n_tokens[t->text];
    return pooling == BN_POOL_MEAN || (pooling == BN_POOL_LAST ? last : position == 0);
}

static int any_cancelled(const texts *t) {
    int any = 0;
    for (int32_t i = 0; i < t->n; i++)
        any |= bn_session_cancelled(t->sessions[i]);
    return any;
}

/* A turn: as many tokens as fit. */
static bn_status run_block(texts *t) {
    const int32_t first = t->text;
    bn_batch b = bn_batch_begin(t->sessions[first]);
    for (; t->text < t->n && b.n < (size_t)t->sessions[first]->batch; next(t)) {
        bn_row *row =
            bn_batch_add(&b, t->sessions[t->text], t->tokens[t->text][t->at], BN_WANT_NOTHING);
        if (counts(t, row->position))
            row->want = BN_WANT_POOLED;
    }
    const bn_status status = any_cancelled(t) ? BN_ERR_CANCELLED : bn_batch_run(&b);
    for (size_t row = 0; row < b.n && status != BN_ERR_CANCELLED; row++) {
        bn_session *s = b.w->rows[row].session;
        s->pooled = status ? 0 : s->position;
    }
    bn_batch_end(&b);
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
    const size_t D = s->stack->config.dim;
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
    const bn_config *c = &sessions[0]->stack->config;
    const int32_t kind = pooling ? (int32_t)pooling : (int32_t)c->pooling;
    bn_status status = BN_OK;
    for (int32_t i = 0; i < n; i++) {
        if ((status = check_text(sessions[i], tokens[i], n_tokens[i], kind)))
            return status;
        for (int32_t j = 0; j < i; j++)
            if (sessions[j] == sessions[i] || sessions[j]->stack != sessions[i]->stack)
                return BN_ERR_ARGUMENT;
    }
    for (int32_t i = 0; i < n; i++)
        sessions[i]->pooling = kind, sessions[i]->ready = BN_READY_NOTHING;
    texts t = {sessions, tokens, n_tokens, n, 0, 0};
    while (t.text < n && !status)
        status = run_block(&t);
    for (int32_t i = 0; i < n && !status && out; i++)
        status = finish(sessions[i], out + (size_t)i * c->dim);
    return status;
}

bn_status bn_session_embed(bn_session *s, const int32_t *tokens, int32_t n, bn_pooling pooling,
                           float *out) {
    return bn_embed_batch(&s, &tokens, &n, 1, pooling, out);
}
