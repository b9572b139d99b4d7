/* SPDX-License-Identifier: MIT
 *
 * append.c: tokens, or vectors, into a session, or a token into each of several.
 */
#include <string.h>

#include "batch.h"
#include "guess.h"
#include "session.h"
#include "workspace.h"

static bn_status append(bn_session *s, const bn_text *text, bn_logits logits, float *out) {
    bn_status status = bn_check_text(s, text);
    if (status)
        return status;
    if (logits != BN_LOGITS_NONE && logits != BN_LOGITS_LAST && logits != BN_LOGITS_ALL)
        return BN_ERR_ARGUMENT;
    const bn_config *c = &s->stack->config;
    if (logits != BN_LOGITS_NONE && !c->has_head)
        return BN_ERR_NO_HEAD;
    const int all = logits == BN_LOGITS_ALL && out != NULL;
    const bn_want each = all ? BN_WANT_LOGITS : BN_WANT_NOTHING;
    const bn_want last = logits == BN_LOGITS_NONE ? BN_WANT_NOTHING : BN_WANT_HIDDEN;
    status = bn_run_text(s, text, each, all ? each : last, all ? out : NULL, c->vocab_size);
    if (!status && logits == BN_LOGITS_LAST && out) {
        const float *row = bn_session_logits(s);
        if (!row)
            return BN_ERR_NUMERIC;
        memcpy(out, row, c->vocab_size * sizeof *out);
    }
    return status;
}

bn_status bn_session_append(bn_session *s, const int32_t *tokens, int32_t n, bn_logits logits,
                            float *out) {
    BN_STANDARD_FLOATS;
    return append(s, &(bn_text){.tokens = tokens, .n = n}, logits, out);
}

bn_status bn_session_append_embeddings(bn_session *s, const float *embeddings, int32_t n,
                                       bn_logits logits, float *out) {
    BN_STANDARD_FLOATS;
    return append(s, &(bn_text){.vectors = embeddings, .n = n}, logits, out);
}

bn_status bn_session_append_prefix(bn_session *s, const int32_t *tokens, const float *embeddings,
                                   int32_t n, bn_logits logits, float *out) {
    BN_STANDARD_FLOATS;
    if (!s || !tokens)
        return BN_ERR_ARGUMENT;
    if (s->stack->config.mask != BN_MASK_PREFIX)
        return BN_ERR_MASK;
    if (s->position > 0)
        return BN_ERR_STATE;
    return append(s, &(bn_text){tokens, embeddings, n, 1}, logits, out);
}

static bn_status check_sessions(bn_session *const *sessions, const int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (sessions[i] && bn_check_follows(sessions[i]))
            return BN_ERR_MASK;
        const bn_status status = bn_check_tokens(sessions[i], tokens ? tokens + i : NULL, 1);
        if (status)
            return status;
        if (!sessions[i]->stack->config.has_head)
            return BN_ERR_NO_HEAD;
        for (int32_t j = 0; j < i; j++)
            if (sessions[j] == sessions[i] || sessions[j]->stack != sessions[i]->stack)
                return BN_ERR_ARGUMENT;
    }
    return BN_OK;
}

bn_status bn_append_batch(bn_session *const *sessions, const int32_t *tokens, int32_t n) {
    BN_STANDARD_FLOATS;
    bn_status status = sessions && n >= 1 ? check_sessions(sessions, tokens, n) : BN_ERR_ARGUMENT;
    for (int32_t i = 0; i < n && !status; i++)
        status = bn_session_reserve(sessions[i], 1);
    for (int32_t i = 0; i < n && !status;) {
        bn_batch b = bn_batch_begin(sessions[i]);
        const int32_t left = n - i, most = (int32_t)b.w->score_rows;
        for (int32_t row = 0; row < left && row < most; row++)
            bn_trail_begin(sessions[i + row], b.w, 1, tokens[i + row]);
        for (int32_t row = 0; row < left && row < most; row++, i++)
            bn_batch_add(&b, sessions[i], tokens[i], BN_WANT_SCORES);
        status = bn_batch_run(&b);
        for (size_t row = 0; row < b.n && !status; row++)
            bn_batch_take(&b, row);
        bn_batch_end(&b);
    }
    return status;
}
