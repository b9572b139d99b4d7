/* SPDX-License-Identifier: MIT
 *
 * groups.h: ternary_grouped built on a tier's own ternary_matmul: the sums of a group, for a block
 * of tokens, are scaled to floats while they are in the L1 cache.
 *
 * Included by a tier's file, so that it is compiled with that tier's flags.
 */
#ifndef BITNET_GROUPS_H
#define BITNET_GROUPS_H

#include <string.h>

#include "inline.h"
#include "kernels.h"

enum { GROUPED_TOKENS = 60 }; /* divisible by 2, 3, 4, 5 and 6, the token blocks of tiers */

typedef void matmul_fn(const bn_matmul *m);

/* y[t][r] = fma((float)(acc[t][r] - q_sums[t * q_sums_stride]), scales[r], y[t][r]), 16 rows. */
typedef void add_group_fn(float *y, const int32_t *acc, const int32_t *q_sums, size_t q_sums_stride,
                          const uint16_t *scales, size_t tokens);

/* One panel and at most GROUPED_TOKENS tokens, starting at `first`. */
INLINE void grouped_tokens(const bn_grouped *m, size_t panel, size_t first, size_t tokens,
                           matmul_fn *matmul, add_group_fn *add) {
    const size_t n_groups = (m->k_tiles + BN_GROUP_TILES - 1) / BN_GROUP_TILES;
    _Alignas(64) int32_t acc[GROUPED_TOKENS * BN_PANEL];
    _Alignas(64) float y[GROUPED_TOKENS * BN_PANEL];
    memset(y, 0, tokens * BN_PANEL * sizeof *y);
    for (size_t g = 0; g < n_groups; g++) {
        const size_t tile = g * BN_GROUP_TILES, left = m->k_tiles - tile;
        matmul(&(bn_matmul){.acc = acc,
                            .acc_stride = BN_PANEL,
                            .tiles = m->tiles + (panel * m->k_tiles + tile) * BN_TILE_BYTES,
                            .panels = 1,
                            .k_tiles = left < BN_GROUP_TILES ? left : BN_GROUP_TILES,
                            .q = m->q + first * m->q_stride + tile * BN_TERNARY_TILE_K,
                            .q_stride = m->q_stride,
                            .tokens = tokens});
        add(y, acc, m->q_sums + first * m->q_sums_stride + g, m->q_sums_stride,
            m->scales + (panel * n_groups + g) * BN_PANEL, tokens);
    }
    for (size_t t = 0; t < tokens; t++)
        memcpy(m->y + (first + t) * m->y_stride + panel * BN_PANEL, y + t * BN_PANEL,
               BN_PANEL * sizeof *y);
}

INLINE void grouped_by(const bn_grouped *m, matmul_fn *matmul, add_group_fn *add) {
    for (size_t p = 0; p < m->panels; p++)
        for (size_t t = 0; t < m->tokens; t += GROUPED_TOKENS) {
            const size_t left = m->tokens - t;
            grouped_tokens(m, p, t, left < GROUPED_TOKENS ? left : GROUPED_TOKENS, matmul, add);
        }
}

#endif
