/* SPDX-License-Identifier: MIT
 *
 * logits.h: the logits that follow the last token of a text, computed from its hidden state on
 * demand.
 */
#ifndef BITNET_LOGITS_H
#define BITNET_LOGITS_H

#include "session.h"
#include "workspace.h"

/* What predicts the next token of a text: the model, or its draft. */
typedef struct bn_prediction {
    const bn_model *model;
    const bn_stack *stack;
    const int32_t *tokens; /* [position] of the text, for penalties */
    int32_t position;      /* of the next token */
    uint64_t seed;         /* of the sampling noise */
    const float *hidden;   /* [D] as in a session, like those below */
    float *logits;         /* [V] */
    int32_t *ready;
    uint32_t *listed; /* [V] */
    void *sampler_scratch;
} bn_prediction;

bn_prediction bn_prediction_of(bn_session *s);

/* In a turn: copy the hidden state to row 0 of x. */
void bn_load_hidden(const bn_prediction *p, bn_workspace *w);

/* In a turn: compute all logits, unless they are available. */
bn_status bn_full_logits(const bn_prediction *p, bn_workspace *w);

#endif
