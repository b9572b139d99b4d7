/* SPDX-License-Identifier: MIT
 *
 * mask.h: which keys a row may see, as a value: a range of positions. Attention asks nothing else.
 */
#ifndef BITNET_MASK_H
#define BITNET_MASK_H

#include <stddef.h>

/* Its own position and all before it; and of the first `prefix` positions of a text, which see each
 * other, those behind it, too. That is all there is: in a bidirectional text all are its prefix. */
typedef struct bn_mask {
    size_t window; /* less than so many positions away, on either side; 0: no limit */
    size_t prefix; /* of the text */
} bn_mask;

/* The first key that a row at this position sees. */
static inline size_t bn_mask_first(bn_mask mask, size_t position) {
    return mask.window && position + 1 > mask.window ? position + 1 - mask.window : 0;
}

/* One past the last. Neither end falls as positions rise. */
static inline size_t bn_mask_end(bn_mask mask, size_t position) {
    if (position >= mask.prefix)
        return position + 1;
    return mask.window && mask.window < mask.prefix - position ? position + mask.window
                                                               : mask.prefix;
}

#endif
