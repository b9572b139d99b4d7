/* SPDX-License-Identifier: MIT
 *
 * mask.h: which keys a row may see, as a value: a range of positions. Attention asks nothing else.
 */
#ifndef BITNET_MASK_H
#define BITNET_MASK_H

#include <stddef.h>

/* Causal: of its own position and before, the latest `window`. */
typedef struct bn_mask {
    size_t window; /* 0: no limit */
} bn_mask;

/* The first key that a row at this position sees. */
static inline size_t bn_mask_first(bn_mask mask, size_t position) {
    return mask.window && position + 1 > mask.window ? position + 1 - mask.window : 0;
}

/* One past the last. Neither end falls as positions rise. */
static inline size_t bn_mask_end(bn_mask mask, size_t position) {
    (void)mask;
    return position + 1;
}

#endif
