/* SPDX-License-Identifier: MIT
 *
 * row.h: what a pass computes at one position of a text.
 */
#ifndef BITNET_ROW_H
#define BITNET_ROW_H

#include "bitnet_runtime.h"
#include "cache.h"

/* What to keep of a computed row, besides its key and value in the cache. From BN_WANT_HIDDEN on
 * its session keeps the hidden state, from which logits can be computed later; for BN_WANT_SCORES
 * only once bn_batch_take is called. */
typedef enum bn_want {
    BN_WANT_NOTHING,
    BN_WANT_POOLED, /* the state after the final norm goes into the session's pool (embed.c) */
    BN_WANT_HIDDEN,
    BN_WANT_LOGITS,      /* out[V] */
    BN_WANT_PROBABILITY, /* out[0] = log probability of the token `next` */
    BN_WANT_SCORES       /* logits or estimates for a sampler, in the workspace (session/batch.h).
                          * Only for the first score_rows rows of a batch without
                          * BN_WANT_PROBABILITY */
} bn_want;

/* A token, vector or image patch: the text it belongs to and its position there. */
typedef struct bn_row {
    bn_session *session;
    bn_cache *cache; /* the session's */
    int32_t position;
    int32_t token;
    const float *vector; /* [D] input of the first layer, or NULL: the token's embedding */
    const float *pixels; /* of the image that the patch is from, or NULL */
    const struct bn_adapter *adapter; /* the session's, or NULL */
    const float *state; /* [D] for a draft row: state, after the final norm, of the token before
                         * `token`; or NULL */
    bn_want want;
    int32_t next;
    float *out;
} bn_row;

#endif
