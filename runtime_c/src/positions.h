/* SPDX-License-Identifier: MIT
 *
 * positions.h: position encoding: RoPE, which rotates queries and keys by angles proportional to
 * the position, or a table of vectors that are added to the input of the stack.
 */
#ifndef BITNET_POSITIONS_H
#define BITNET_POSITIONS_H

#include "file/file.h"

enum { BN_POSITION_TABLES = 2 }; /* one for all layers, or global and local */

typedef struct bn_positions {
    size_t dim;    /* dimensions of a head that are rotated; 0: none */
    int32_t first; /* RoPE position of the first row of a text */
    float factor;  /* attention factor of scaled RoPE, applied to cos and sin */
    const float *frequencies[BN_POSITION_TABLES]; /* [dim / 2], or NULL */
    bn_tensor vectors;                            /* learned or sinusoidal, [max_context][D] */
} bn_positions;

bn_positions bn_positions_read(const bn_file *file, uint32_t stack);

/* x[0..D) += the vector of this position, if there is a table; scratch: [D]. */
void bn_positions_add(const bn_positions *positions, const bn_kernels *kernels, int32_t position,
                      float *x, float *scratch);

/* cos and sin of each angle of a table at this position, interleaved: angle[dim]. */
void bn_positions_angles(const bn_positions *positions, size_t table, int32_t position,
                         float *angle);

/* Rotate a head of a query or a key. */
void bn_positions_rotate(float *head, const float *angle, size_t dim);

#endif
