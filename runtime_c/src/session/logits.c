/* SPDX-License-Identifier: MIT
 *
 * logits.c: see logits.h.
 */
#include "logits.h"

#include <string.h>

#include "head.h"
#include "turn.h"

void bn_load_hidden(const bn_session *s, bn_workspace *w) {
    memcpy(w->x, s->hidden, s->stack->config.dim * sizeof *s->hidden);
}

bn_status bn_full_logits(bn_session *s, bn_workspace *w) {
    if (s->ready == BN_READY_LOGITS)
        return BN_OK;
    bn_load_hidden(s, w);
    const bn_status status = bn_head(s->model, s->stack, w, 1, s->logits);
    if (!status)
        s->ready = BN_READY_LOGITS;
    return status;
}

const float *bn_session_logits(bn_session *s) {
    BN_STANDARD_FLOATS;
    if (!s || s->ready == BN_READY_NOTHING)
        return NULL;
    if (s->ready == BN_READY_LOGITS)
        return s->logits;
    const bn_status status = bn_full_logits(s, bn_turn_begin(s->model));
    bn_turn_end(s->model);
    return status ? NULL : s->logits;
}
