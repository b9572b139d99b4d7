/* SPDX-License-Identifier: MIT
 *
 * tiles.h: matrices stored as tiles of 16 rows, TERNARY_2BIT and TERNARY_5TRIT; see encodings.h.
 */
#ifndef BITNET_TILES_H
#define BITNET_TILES_H

#include "operands.h"

/* Arguments of a kernel that multiplies panels [panel, panel + n) of a matrix in tiles of tile_k
 * columns by all rows, into acc [rows][BN_CHUNK_ROWS]. */
bn_matmul bn_tiles_of(const bn_input *in, const bn_tensor *t, size_t tile_k, size_t panel, size_t n,
                      int32_t *acc);

void bn_multiply_two_bit(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                         int32_t *acc);
void bn_multiply_trits(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                       int32_t *acc);
void bn_row_two_bit(const bn_kernels *kernels, const bn_tensor *t, size_t row, float *x);

/* Computes the group_sums of a row from its first `width` elements of q, for scales of scope
 * GROUP. */
void bn_sum_groups(const bn_operands *o, size_t row, size_t width);

#endif
