/* SPDX-License-Identifier: MIT
 *
 * groups.h: ternary_grouped out of a tier's own ternary_matmul: the sums of a group, for a few
 * tokens, are made into floats while they are in the L1 cache.
 *
 * Included by a tier's file, and so compiled with its flags.
 */
#ifndef BITNET_GROUPS_H
#define BITNET_GROUPS_H

#include <math.h>
#include <string.h>

#include "kernels.h"

enum { GROUPED_TOKENS = 32 };

typedef void matmul_fn(const bn_matmul *m);
typedef void widen_fn(float y[BN_PANEL], const uint16_t x[BN_PANEL]);

/* One panel and at most GROUPED_TOKENS tokens from `first` on. */
static inline __attribute__((always_inline)) void grouped_tokens(const bn_grouped *m, size_t panel,
                                                                 size_t first, size_t tokens,
                                                                 matmul_fn *matmul,
                                                                 widen_fn *widen) {
    const size_t n_groups = (m->k_tiles + BN_GROUP_TILES - 1) / BN_GROUP_TILES;
    _Alignas(64) int32_t acc[GROUPED_TOKENS * BN_PANEL];
    _Alignas(64) float y[GROUPED_TOKENS * BN_PANEL], scale[BN_PANEL];
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
        widen(scale, m->scales + (panel * n_groups + g) * BN_PANEL);
        for (size_t t = 0; t < tokens; t++) {
            const int32_t sum = m->q_sums[(first + t) * m->q_sums_stride + g];
            for (size_t r = 0; r < BN_PANEL; r++)
                y[t * BN_PANEL + r] =
                    fmaf((float)(acc[t * BN_PANEL + r] - sum), scale[r], y[t * BN_PANEL + r]);
        }
    }
    for (size_t t = 0; t < tokens; t++)
        memcpy(m->y + (first + t) * m->y_stride + panel * BN_PANEL, y + t * BN_PANEL,
               BN_PANEL * sizeof *y);
}

static inline __attribute__((always_inline)) void grouped_by(const bn_grouped *m, matmul_fn *matmul,
                                                             widen_fn *widen) {
    for (size_t p = 0; p < m->panels; p++)
        for (size_t t = 0; t < m->tokens; t += GROUPED_TOKENS) {
            const size_t left = m->tokens - t;
            grouped_tokens(m, p, t, left < GROUPED_TOKENS ? left : GROUPED_TOKENS, matmul, widen);
        }
}

#endif
