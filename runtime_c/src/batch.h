/* SPDX-License-Identifier: MIT
 *
 * batch.h: rows to compute together, of one text or of several.
 */
#ifndef BITNET_BATCH_H
#define BITNET_BATCH_H

#include "cache.h"

/* A token, or a vector in its place: which text it belongs to and where it stands in it. */
typedef struct bn_row {
    bn_cache *cache;
    int32_t position;
    int32_t token;
    const float *vector; /* [D] what enters the first layer, or NULL: the token's embedding */
} bn_row;

#endif
