/* SPDX-License-Identifier: MIT
 *
 * append.c: append tokens or vectors to a session, or repeat those it has.
 */
#include <string.h>

#include "batch.h"
#include "session.h"

static bn_status append(bn_session *s, const bn_text *text, bn_logits logits, float *out) {
    bn_status status = bn_check_text(s, text);
    if (status)
        return status;
    if (logits != BN_LOGITS_NONE && logits != BN_LOGITS_LAST && logits != BN_LOGITS_ALL)
        return BN_ERR_ARGUMENT;
    const bn_config *c = &s->stack->config;
    if (logits != BN_LOGITS_NONE && !c->has_head)
        return BN_ERR_NO_HEAD;
    const bn_want wanted = logits == BN_LOGITS_NONE         ? BN_WANT_NOTHING
                           : logits == BN_LOGITS_ALL && out ? BN_WANT_LOGITS
                                                            : BN_WANT_HIDDEN; /* and its digest */
    const bn_want each = logits == BN_LOGITS_ALL ? wanted : BN_WANT_NOTHING;
    float *rows = wanted == BN_WANT_LOGITS ? out : NULL;
    status = bn_run_text(s, text, each, wanted, rows, c->vocab_size);
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

bn_status bn_session_repeat(bn_session *s, int32_t n) {
    enum { FIRST = BN_REPEATED };
    _Static_assert((int)BN_REPEATED == BN_BLOCK_KEYS, "the cache repeats its first block");
    if (!s || n < FIRST)
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    if (s->position < FIRST || s->stack->config.mask == BN_MASK_BIDIRECTIONAL)
        return BN_ERR_STATE;
    bn_status status = n > s->n_ctx ? BN_ERR_CONTEXT : bn_session_cut(s, FIRST);
    if (!status)
        status = bn_session_reserve(s, n - FIRST);
    if (status)
        return status;
    bn_cache_repeat(&s->cache, (size_t)n);
    for (; s->position < n; s->position++) {
        s->tokens[s->position] = s->tokens[s->position - FIRST];
        s->digests[s->position] = 0;
    }
    s->drafted += s->drafted > 0 ? n - FIRST : 0;
    s->ready = BN_READY_NOTHING;
    return BN_OK;
}
