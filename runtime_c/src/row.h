/* SPDX-License-Identifier: MIT
 *
 * row.h: what a pass computes at one position of a text.
 */
#ifndef BITNET_ROW_H
#define BITNET_ROW_H

#include "bitnet_runtime.h"
#include "cache.h"

/* What becomes of a computed row, but for its key and value in the cache. From BN_WANT_HIDDEN on
 * its session keeps the hidden state, from which logits can be had later, of BN_WANT_SCORES when it
 * takes them. */
typedef enum bn_want {
    BN_WANT_NOTHING,
    BN_WANT_POOLED, /* the state after the final norm goes into the session's pool (embed.c) */
    BN_WANT_HIDDEN,
    BN_WANT_LOGITS,      /* out[V] */
    BN_WANT_PROBABILITY, /* out[0] = log of the probability of the token `next` */
    BN_WANT_SCORES /* what a sampler can do with, in the workspace: see session/batch.h. Of the
                    * first score_rows rows, and no others then want probabilities */
} bn_want;

/* A token, or a vector or a patch in its place: which text it belongs to and where it stands in it.
 */
typedef struct bn_row {
    bn_session *session;
    bn_cache *cache; /* the session's */
    int32_t position;
    int32_t token;
    const float *vector; /* [D] what enters the first layer, or NULL: the token's embedding */
    const float *pixels; /* of the image of which a patch enters, or NULL */
    const struct bn_adapter *adapter; /* the session's, or NULL */
    const float *state; /* [D] of a draft: behind the final norm, of the token before; or NULL */
    bn_want want;
    int32_t next;
    float *out;
} bn_row;

#endif
