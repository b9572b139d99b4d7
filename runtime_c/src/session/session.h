/* SPDX-License-Identifier: MIT
 *
 * session.h: one text, and what is kept of it.
 */
#ifndef BITNET_SESSION_H
#define BITNET_SESSION_H

#include <stdatomic.h>

#include "bitnet_runtime.h"
#include "cache.h"
#include "model.h"

/* What a session has of its last token: its hidden state, with it estimates of its logits, or they
 * themselves. */
enum { BN_READY_NOTHING, BN_READY_HIDDEN, BN_READY_ESTIMATES, BN_READY_LOGITS };

struct bn_session {
    bn_model *model;
    const bn_stack *stack;
    bn_cache cache;
    bn_arena **blocks; /* its table */
    int32_t adapter;   /* its number, 0: none */
    int32_t n_ctx, position;
    int32_t batch;     /* tokens of a prompt that make a turn */
    int32_t *tokens;   /* [C] */
    uint64_t *digests; /* [C] of hidden, for each token that had one */
    float *hidden;     /* [D] x of the last token, before the final norm */
    float *logits;     /* [V] of the last token, or estimates of them */
    uint32_t *listed;  /* [V] scratch: of which tokens logits are computed (choose.c) */
    int32_t ready;     /* which of these is there */
    float *pool;       /* [D] hidden states so far, as bn_session_embed pools them */
    int32_t pooled;    /* tokens in it */
    int32_t pooling;   /* and how */
    float *trail;      /* [BN_TRAIL + 2][D] states that the draft waits with (trail.h); scratch */
    int32_t trailing;  /* how many */
    int32_t drafted;   /* rows that the draft has in the cache; -1: it never will */
    bn_luck luck;
    bn_repeats repeats;
    void *sampler_scratch;
    uint64_t seed;    /* of the noise of sampling */
    uint64_t skipped; /* bytes of weights that its batches left out */
    void *memory;
    size_t memory_size;
    atomic_int cancelled; /* until the next rewind */
};

enum { BN_TRAIL = 16 };

/* What is to be appended. */
typedef struct bn_text {
    const int32_t *tokens; /* [n]; BN_NO_TOKEN takes the next vector. NULL: vectors alone */
    const float *vectors;  /* [...][D], or NULL when there are none */
    int32_t n;
    int32_t prefix; /* they all see each other, as they do anyway with a bidirectional mask */
} bn_text;

/* What every call that takes a text refuses before any work; of tokens alone the first will do. */
bn_status bn_check_tokens(const bn_session *s, const int32_t *tokens, int32_t n);
bn_status bn_check_text(const bn_session *s, const bn_text *text);

/* bn_session_rewind to n, from 0 to the position, which does not take back a cancel. */
bn_status bn_session_cut(bn_session *s, int32_t n);

static inline int32_t bn_smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* BN_ERR_MASK where no token can follow what is there. */
static inline bn_status bn_check_follows(const bn_session *s) {
    return s->stack->config.mask == BN_MASK_BIDIRECTIONAL ? BN_ERR_MASK : BN_OK;
}

#endif
