/* SPDX-License-Identifier: MIT
 *
 * gemm.h: products with many tokens. A stretch of a panel is unpacked once, into L1, and then
 * multiplied with all tokens. Each tier supplies the byte layout (put_block) and the loop
 * (multiply_panel).
 */
#ifndef BITNET_ARM_GEMM_H
#define BITNET_ARM_GEMM_H

#include "arm.h"

enum {
    STRETCH = 512,       /* columns unpacked at a time: 8 KiB */
    BLOCK = 8 * BN_PANEL /* bytes of 8 unpacked columns */
};

/* Stores columns 0..3 (a) and 4..7 (b) of rows 4g..4g+3 into a block. */
typedef void put_block(int8_t *block, int g, int8x16_t a, int8x16_t b);

/* acc[t][16 panel + row] += w·q[t][k...] over 16·steps columns, for all tokens. */
typedef void multiply_panel(const bn_matmul *m, size_t panel, const int8_t *w, size_t k,
                            size_t steps);

INLINE void ternary_gemm(const bn_matmul *m, put_block *put, multiply_panel *multiply) {
    enum { TILES = STRETCH / BN_TERNARY_TILE_K };
    int8_t w[STRETCH * BN_PANEL] __attribute__((aligned(64)));
    clear(m);
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *group = m->tiles + p * m->panel_stride;
        for (size_t first = 0; first < m->k_tiles; first += TILES) {
            const size_t tiles = m->k_tiles - first < TILES ? m->k_tiles - first : TILES;
            for (size_t i = 0; i < tiles; i++) {
                UNROLL
                for (int g = 0; g < 4; g++, group += 16) {
                    int8x16_t field[4];
                    ternary_fields(field, group);
                    put(w + 2 * i * BLOCK, g, field[0], field[1]);
                    put(w + 2 * i * BLOCK + BLOCK, g, field[2], field[3]);
                }
            }
            multiply(m, p, w, first * BN_TERNARY_TILE_K, tiles);
        }
    }
}

#endif
