/* SPDX-License-Identifier: MIT
 *
 * sizes.h: sizes in bytes of stored matrices, in checked arithmetic.
 */
#ifndef BITNET_SIZES_H
#define BITNET_SIZES_H

#include <stdint.h>

/* Each sets *size and returns 1, or returns 0 on overflow. */

/* Panels of 16 rows, cut into tiles of tile_k columns. */
int bn_tiles_size(uint64_t rows, uint64_t cols, uint64_t tile_k, uint64_t *size);

/* `lines` lines of `codes` codes, `block` of them in 64 bytes. */
int bn_lines_size(uint64_t lines, uint64_t codes, uint64_t block, uint64_t *size);

/* A value of `bytes` bytes for each row and column. */
int bn_values_size(uint64_t rows, uint64_t cols, uint64_t bytes, uint64_t *size);

#endif
