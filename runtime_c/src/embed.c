/* SPDX-License-Identifier: MIT
 *
 * embed.c: one vector for a whole text: its hidden states after the final norm, pooled, of length
 * 1. A mean adds them up token by token, so that no cut of the text changes a bit.
 */
#include <math.h>
#include <string.h>

#include "internal.h"

/* Take the rows of the workspace, the session's latest tokens, into its pool. */
static bn_status pool_rows(bn_session *s, int32_t start, int32_t n, int32_t total, void *context) {
    const bn_model *m = s->model;
    const size_t D = m->config.dim;
    const int32_t pooling = s->pooling, begin = s->position - n; /* of these rows */
    const int32_t row0 = pooling == BN_POOL_LAST ? n - 1 : 0;
    const int32_t end = pooling != BN_POOL_FIRST ? n : begin == 0;
    (void)start, (void)total, (void)context;
    for (int32_t row = row0; row < end; row++) {
        float *h = s->work.h;
        const float *x = s->work.x + (size_t)row * D;
        if (!isfinite(m->kernels.rms_norm(h, x, m->final_norm, D, m->config.norm_eps)))
            return BN_ERR_NUMERIC;
        if (pooling != BN_POOL_MEAN || begin + row == 0)
            memcpy(s->pool, h, D * sizeof *h);
        else
            for (size_t d = 0; d < D; d++)
                s->pool[d] += h[d];
    }
    s->pooled = s->position;
    return BN_OK;
}

bn_status bn_session_embed(bn_session *s, const int32_t *tokens, int32_t n, bn_pooling pooling,
                           float *out) {
    bn_status status = bn_check_tokens(s, tokens, n);
    if (status)
        return status;
    const int32_t kind = (int32_t)pooling ? (int32_t)pooling : (int32_t)s->model->config.pooling;
    if (kind < BN_POOL_LAST || kind > BN_POOL_FIRST)
        return BN_ERR_ARGUMENT;
    if (s->position > 0 && (s->pooled != s->position || s->pooling != kind))
        return BN_ERR_STATE;
    s->pooling = kind;
    status = bn_run_blocks(s, tokens, n, pool_rows, NULL);
    if (status || !out)
        return status;
    const size_t D = s->model->config.dim;
    float squares;
    s->model->kernels.f32_matmul(&squares, 1, s->pool, 1, D, s->pool, D, 1);
    if (!isfinite(squares))
        return BN_ERR_NUMERIC;
    const float length = fmaxf(sqrtf(squares), 1e-12f);
    for (size_t d = 0; d < D; d++)
        out[d] = s->pool[d] / length;
    return BN_OK;
}
