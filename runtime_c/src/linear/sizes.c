/* SPDX-License-Identifier: MIT
 *
 * sizes.c: sizes in checked arithmetic, because numbers from a file can be arbitrarily large.
 */
#include "sizes.h"

#include "kernels/shapes.h"

static int round_up(uint64_t x, uint64_t unit, uint64_t *units) {
    uint64_t sum;
    if (__builtin_add_overflow(x, unit - 1, &sum))
        return 0;
    *units = sum / unit;
    return 1;
}

int bn_tiles_size(uint64_t rows, uint64_t cols, uint64_t tile_k, uint64_t *size) {
    uint64_t panels, tiles;
    return round_up(rows, BN_PANEL, &panels) && round_up(cols, tile_k, &tiles) &&
           !__builtin_mul_overflow(panels, tiles, size) &&
           !__builtin_mul_overflow(*size, BN_TILE_BYTES, size);
}

int bn_lines_size(uint64_t lines, uint64_t codes, uint64_t block, uint64_t *size) {
    uint64_t blocks;
    return round_up(codes, block, &blocks) && !__builtin_mul_overflow(lines, blocks, size) &&
           !__builtin_mul_overflow(*size, BN_TILE_BYTES, size);
}

int bn_values_size(uint64_t rows, uint64_t cols, uint64_t bytes, uint64_t *size) {
    return !__builtin_mul_overflow(rows, cols, size) && !__builtin_mul_overflow(*size, bytes, size);
}
