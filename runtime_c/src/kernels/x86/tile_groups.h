/* SPDX-License-Identifier: MIT
 *
 * tile_groups.h: ternary_grouped with AMX. The sums of a group, two steps, are stored to L1,
 * converted to floats and added to y.
 */
#ifndef BITNET_X86_TILE_GROUPS_H
#define BITNET_X86_TILE_GROUPS_H

#include "tile_codes.h"

/* y[t][r] = fma((float)(sums[t][r] - q_sums[t]), scales[r], y[t][r]), 16 rows. new: y starts at
 * 0. */
INLINE void add_tile(float *y, size_t y_stride, const int32_t *sums_of, const int32_t *q_sums,
                     size_t q_sums_stride, const uint16_t *scales, size_t tokens, int new) {
    const vec scale = vec_widen(scales);
    for (; tokens > 0; tokens--, y += y_stride, sums_of += BN_PANEL, q_sums += q_sums_stride) {
        const vec before = new ? vec_zero() : vec_load(y);
        vec_store(y, vec_fma(vec_from_int(sums_load(sums_of) - *q_sums), scale, before));
    }
}

/* T token tiles times a part of P panels from `panel` on. unpacked: an earlier block has unpacked
 * the codes. */
INLINE void group_block(const bn_grouped *m, size_t panel, const token_block *at,
                        const code_part *w, const int unpacked, const int T, const int P) {
    const size_t size = tile_tokens(m->tokens);
    const size_t n_groups = shares_of(m->k_tiles);
    const size_t overlap = T > 1 ? size - at->apart : 0; /* of the second tile with the first */
    const int8_t *q = m->q + at->first * m->q_stride + w->first_step * STEP_K;
    const int8_t *q_1 = q + at->apart * m->q_stride;
    _Alignas(64) int32_t sums_of[4][TILE_ROWS * BN_PANEL];
    for (size_t s = 0; !unpacked && s < bn_min(EARLY, w->n_steps); s++)
        unpack_step(w, s, (size_t)P);
    for (size_t s = 0; s < w->n_steps;) {
        const size_t group = (w->first_step + s) / SHARE;
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        for (size_t end = bn_min(s + SHARE, w->n_steps); s < end; s++) {
            if (!unpacked && s + EARLY < w->n_steps)
                unpack_step(w, s + EARLY, (size_t)P);
            multiply_step(q + s * STEP_K, q_1 + s * STEP_K, m->q_stride,
                          w->codes + s * PAIR * TILE_SIZE, T, P);
        }
        tile_store(0, sums_of[0], TILE_COLUMNS);
        tile_store(1, sums_of[1], TILE_COLUMNS);
        tile_store(2, sums_of[2], TILE_COLUMNS);
        tile_store(3, sums_of[3], TILE_COLUMNS);
        UNROLL
        for (size_t t = 0; t < (size_t)T; t++) {
            const size_t skip = t ? overlap : 0, token = at->first + t * at->apart + skip;
            UNROLL
            for (size_t p = 0; p < (size_t)P; p++)
                add_tile(m->y + token * m->y_stride + (panel + p) * BN_PANEL, m->y_stride,
                         sums_of[2 * t + p] + skip * BN_PANEL,
                         m->q_sums + token * m->q_sums_stride + group, m->q_sums_stride,
                         m->scales + ((panel + p) * n_groups + group) * BN_PANEL, size - skip,
                         group == 0);
        }
    }
}

INLINE void group_panels(const bn_grouped *m, size_t panel, uint8_t *codes, const int P) {
    const size_t stride = m->k_tiles * BN_TILE_BYTES;
    for (size_t i = 0; i < parts_of(m->k_tiles); i++) {
        const code_part w = part_of(m->tiles + panel * stride, stride, m->k_tiles, 0, i, codes);
        for (size_t b = 0; b < token_blocks(m->tokens); b++) {
            const token_block at = token_block_of(m->tokens, b);
            if (!at.two)
                group_block(m, panel, &at, &w, 0, 1, P);
            else if (b == 0)
                group_block(m, panel, &at, &w, 0, 2, P);
            else
                group_block(m, panel, &at, &w, 1, 2, P);
        }
    }
}

INLINE void group_tokens(const bn_grouped *m) {
    _Alignas(64) uint8_t codes[CODES_SIZE];
    size_t p = 0;
    tiles_for(m->tokens);
    for (; p + PAIR <= m->panels; p += PAIR)
        group_panels(m, p, codes, PAIR);
    if (p < m->panels)
        group_panels(m, p, codes, 1);
    tiles_release();
}

#endif
