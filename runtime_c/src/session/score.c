/* SPDX-License-Identifier: MIT
 *
 * score.c: the log probabilities of a text's tokens.
 */
#include <math.h>

#include "batch.h"
#include "head.h"
#include "session.h"

bn_status bn_session_score(bn_session *s, const int32_t *tokens, int32_t n, float *out) {
    BN_STANDARD_FLOATS;
    if (s && bn_check_follows(s))
        return BN_ERR_MASK;
    bn_status status = bn_check_tokens(s, tokens, n);
    if (status)
        return status;
    if (!out)
        return BN_ERR_ARGUMENT;
    const bn_config *c = &s->stack->config;
    const bn_text text = {.tokens = tokens, .n = n};
    if (!c->has_head)
        return BN_ERR_NO_HEAD;
    if (s->position > 0 && s->ready == BN_READY_NOTHING)
        return BN_ERR_STATE;
    const float *row = s->position > 0 ? bn_session_logits(s) : NULL;
    if (s->position > 0 && !row)
        return BN_ERR_NUMERIC;
    const float first =
        row ? bn_log_probability(&s->model->kernels, row, c->vocab_size, tokens[0]) : (float)NAN;
    if (row && !isfinite(first))
        return BN_ERR_NUMERIC;
    status = bn_session_reserve(s, n);
    if (status)
        return status;
    out[0] = first;
    /* each row gives the probability of the following token */
    return bn_run_text(s, &text, BN_WANT_PROBABILITY, BN_WANT_HIDDEN, out + 1, 1);
}
