/* SPDX-License-Identifier: MIT
 *
 * session.h: the state of a session: one text.
 */
#ifndef BITNET_SESSION_H
#define BITNET_SESSION_H

#include <stdatomic.h>

#include "bitnet_runtime.h"
#include "cache.h"
#include "model.h"
#include "repeats.h"

/* What a session has for its last token: the hidden state; also estimates of its logits; or the
 * logits. */
enum { BN_READY_NOTHING, BN_READY_HIDDEN, BN_READY_ESTIMATES, BN_READY_LOGITS };

struct bn_session {
    bn_model *model;
    const bn_stack *stack;
    bn_cache cache;
    bn_arena **blocks; /* block table of the cache */
    int32_t adapter;   /* 1-based index; 0: none */
    int32_t n_ctx, position;
    int32_t batch;     /* prompt tokens per turn */
    int32_t *tokens;   /* [C] */
    uint64_t *digests; /* [C] hash of hidden, for each token that had one */
    float *hidden;     /* [D] x of the last token, before the final norm */
    float *logits;     /* [V] of the last token, or estimates of them */
    uint32_t *listed;  /* [V] scratch: tokens whose logits are computed (choose.c) */
    int32_t ready;     /* which of these are valid: BN_READY_... */
    float *pool;       /* [D] pooled hidden states so far (bn_session_embed) */
    int32_t pooled;    /* tokens in the pool */
    int32_t pooling;   /* bn_pooling of the pool */
    float *backlog;    /* [BN_BACKLOG + 2][D] states not yet taken by the draft (backlog.h), and
                        * scratch */
    int32_t pending;   /* number of such states */
    int32_t drafted;   /* draft rows in the cache; -1: it never guesses */
    bn_draft_stats draft_stats;
    bn_repeats repeats;
    void *sampler_scratch;
    uint64_t seed;    /* of the sampling noise */
    uint64_t skipped; /* bytes of weights that its batches skipped */
    void *memory;
    size_t memory_size;
    atomic_int cancelled; /* 1: until the next rewind */
};

enum { BN_BACKLOG = 16 };

/* A text to be appended. */
typedef struct bn_text {
    const int32_t *tokens; /* [n]; BN_NO_TOKEN takes the next vector; NULL: only vectors */
    const float *vectors;  /* [...][D], or NULL when there are none */
    int32_t n;
    int32_t prefix; /* 1: its tokens all see each other; implied by a bidirectional mask */
} bn_text;

/* The checks of every call that takes a text, before any work; the first one suffices for
 * tokens. */
bn_status bn_check_tokens(const bn_session *s, const int32_t *tokens, int32_t n);
bn_status bn_check_text(const bn_session *s, const bn_text *text);

/* bn_session_rewind to n, from 0 to the position, without clearing a cancel. */
bn_status bn_session_cut(bn_session *s, int32_t n);

static inline int32_t bn_smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* BN_ERR_MASK if no token can follow the text. */
static inline bn_status bn_check_follows(const bn_session *s) {
    return s->stack->config.mask == BN_MASK_BIDIRECTIONAL ? BN_ERR_MASK : BN_OK;
}

#endif
