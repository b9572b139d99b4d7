/* SPDX-License-Identifier: MIT
 *
 * mask.h: which keys a row may see: a range of positions. Attention needs nothing else.
 */
#ifndef BITNET_MASK_H
#define BITNET_MASK_H

#include <stddef.h>

/* A row sees its own position and all before it; rows of the first `prefix` positions of a text
 * also see the rest of these. A bidirectional text is all prefix. */
typedef struct bn_mask {
    size_t window; /* positions less than this far away, in either direction; 0: no limit */
    size_t prefix; /* length of the text's prefix */
} bn_mask;

/* The first key that the row at `position` sees. */
static inline size_t bn_mask_first(bn_mask mask, size_t position) {
    return mask.window && position + 1 > mask.window ? position + 1 - mask.window : 0;
}

/* One past the last key that it sees. Neither end of the range decreases with the position. */
static inline size_t bn_mask_end(bn_mask mask, size_t position) {
    if (position >= mask.prefix)
        return position + 1;
    return mask.window && mask.window < mask.prefix - position ? position + mask.window
                                                               : mask.prefix;
}

#endif
