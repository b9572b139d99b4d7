/* SPDX-License-Identifier: MIT
 *
 * tile_groups.h: ternary_grouped with AMX. The sums of a group, two steps, are stored to L1,
 * converted to floats and added to y.
 */
#ifndef BITNET_X86_TILE_GROUPS_H
#define BITNET_X86_TILE_GROUPS_H

#include "tile_codes.h"

enum { SHARE = BN_SCALE_GROUP_K / STEP_K }; /* steps of a group */

/* The outputs of a block: [token tile][token][panel][16 rows]. */
typedef float block_outputs[PAIR][TILE_ROWS][PAIR][BN_PANEL];

/* y = fma((float)(sum - q_sums[token]), scales[row], y) for a tile of tokens and P panels. first: y
 * starts at 0. scales: of the first panel, the next one's lie `apart` behind. */
INLINE void add_group(float (*y)[PAIR][BN_PANEL], int32_t (*sums_of)[TILE_ROWS][BN_PANEL],
                      const int32_t *q_sums, size_t q_sums_stride, const uint16_t *scales,
                      size_t apart, size_t tokens, const int first, const int P) {
    vec scale[PAIR] = {vec_widen(scales)};
    if (P > 1)
        scale[1] = vec_widen(scales + apart);
    for (size_t t = 0; t < tokens; t++, q_sums += q_sums_stride) {
        UNROLL
        for (size_t p = 0; p < (size_t)P; p++) {
            const vec before = first ? vec_zero() : vec_load(y[t][p]);
            const sums sum = sums_load(sums_of[p][t]) - *q_sums;
            vec_store(y[t][p], vec_fma(vec_from_int(sum), scale[p], before));
        }
    }
}

/* T token tiles times P panels from `panel` on, all columns. */
INLINE void group_block(const bn_grouped *m, const code_panels *all, const token_block *at,
                        size_t panel, size_t share, uint8_t *ring, const int T, const int P) {
    const size_t size = tile_tokens(m->tokens);
    const int8_t *q = m->q + at->first * m->q_stride;
    const int32_t *q_sums = m->q_sums + at->first * m->q_sums_stride;
    code_source w = source_of(all, panel, ring, share, token_blocks(m->tokens), P);
    const size_t groups = (w.steps + SHARE - 1) / SHARE;
    const uint16_t *scales = m->scales + panel * groups * BN_PANEL;
    _Alignas(64) block_sums sums_of;
    _Alignas(64) block_outputs y;
    will_write(&w, m->y + at->first * m->y_stride + panel * BN_PANEL, m->y_stride,
               at->apart + size);
    start_unpacking(&w, TERNARY_CODES, P);
    for (size_t g = 0; g < groups; g++, q_sums++, scales += BN_PANEL) {
        clear_sums();
        multiply_steps(&w, g * SHARE, bn_min((g + 1) * SHARE, w.steps), q,
                       q + at->apart * m->q_stride, m->q_stride, TERNARY_CODES, T, P);
        store_sums(sums_of, T, P);
        UNROLL
        for (size_t t = 0; t < (size_t)T; t++)
            add_group(y[t], sums_of[t], q_sums + t * at->apart * m->q_sums_stride, m->q_sums_stride,
                      scales, groups * BN_PANEL, size, g == 0, P);
    }
    for (size_t t = 0; t < (size_t)T; t++)
        for (size_t r = 0; r < size; r++)
            for (size_t p = 0; p < (size_t)P; p++)
                vec_store(m->y + (at->first + t * at->apart + r) * m->y_stride +
                              (panel + p) * BN_PANEL,
                          vec_load(y[t][r][p]));
}

INLINE void group_tokens(const bn_grouped *m) {
    const code_panels all = {m->tiles, m->k_tiles * BN_TILE_BYTES, m->panels, m->k_tiles};
    _Alignas(64) uint8_t ring[RING_AND_SPARE];
    tiles_for(m->tokens);
    for (size_t b = 0; b < token_blocks(m->tokens); b++) {
        const token_block at = token_block_of(m->tokens, b);
        for (size_t p = 0; p < m->panels; p += PAIR) {
#define BLOCK(T, P) group_block(m, &all, &at, p, b, ring, T, P)
            EACH_SHAPE(BLOCK, at.two, p + PAIR <= m->panels)
#undef BLOCK
        }
    }
    tiles_release();
}

#endif
