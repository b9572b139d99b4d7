/* SPDX-License-Identifier: MIT
 *
 * logits.c: see logits.h.
 */
#include "logits.h"

#include <string.h>

#include "head.h"
#include "turn.h"

bn_prediction bn_prediction_of(bn_session *s) {
    return (bn_prediction){.model = s->model,
                           .stack = s->stack,
                           .tokens = s->tokens,
                           .position = s->position,
                           .seed = s->seed,
                           .hidden = s->hidden,
                           .logits = s->logits,
                           .ready = &s->ready,
                           .listed = s->listed,
                           .sampler_scratch = s->sampler_scratch};
}

void bn_load_hidden(const bn_prediction *p, bn_workspace *w) {
    memcpy(w->x, p->hidden, p->stack->config.dim * sizeof *p->hidden);
}

bn_status bn_full_logits(const bn_prediction *p, bn_workspace *w) {
    if (*p->ready == BN_READY_LOGITS)
        return BN_OK;
    bn_load_hidden(p, w);
    const bn_status status = bn_head(p->model, p->stack, w, 1, p->logits);
    if (!status)
        *p->ready = BN_READY_LOGITS;
    return status;
}

const float *bn_session_logits(bn_session *s) {
    BN_STANDARD_FLOATS;
    if (!s || s->ready == BN_READY_NOTHING)
        return NULL;
    if (s->ready == BN_READY_LOGITS)
        return s->logits;
    const bn_prediction p = bn_prediction_of(s);
    const bn_status status = bn_full_logits(&p, bn_turn_begin(s->model));
    bn_turn_end(s->model);
    return status ? NULL : s->logits;
}
