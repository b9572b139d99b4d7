/* SPDX-License-Identifier: MIT
 *
 * layout.h: one allocation divided into aligned pieces.
 */
#ifndef BITNET_LAYOUT_H
#define BITNET_LAYOUT_H

#include "kernels/shapes.h"

enum { BN_PIECE_ALIGN = 64 };

/* Hands out pieces one after the other. With base NULL it only measures: all pieces are NULL, and
 * `used` is the size to allocate. */
typedef struct bn_layout {
    uint8_t *base; /* aligned to BN_PIECE_ALIGN */
    size_t used;
} bn_layout;

static inline void *bn_piece(bn_layout *l, size_t count, size_t size) {
    const size_t at = l->used;
    l->used = bn_round_up(at + count * size, BN_PIECE_ALIGN);
    return l->base ? l->base + at : NULL;
}

#endif
