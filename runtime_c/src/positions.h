/* SPDX-License-Identifier: MIT
 *
 * positions.h: how a row knows where it stands in its text: RoPE, which turns queries and keys by
 * angles that grow with the position, or a table of vectors that are added to what enters.
 */
#ifndef BITNET_POSITIONS_H
#define BITNET_POSITIONS_H

#include "file/file.h"

enum { BN_POSITION_TABLES = 2 }; /* of all layers, or global and local */

typedef struct bn_positions {
    size_t dim;    /* values of a head that are turned; 0: none */
    int32_t first; /* by what angle the first row of a text is turned */
    float factor;  /* of attention, which scaled RoPE brings */
    const float *frequencies[BN_POSITION_TABLES]; /* [dim / 2], or NULL */
    bn_tensor vectors;                            /* learned or sinusoidal, [max_context][D] */
} bn_positions;

bn_positions bn_positions_read(const bn_file *file, uint32_t stack);

/* x[0..D) += the vector of this position, where there are some; scratch: [D]. */
void bn_positions_add(const bn_positions *positions, const bn_kernels *kernels, int32_t position,
                      float *x, float *scratch);

/* cos and sin of each angle of a table at this position: angle[dim]. */
void bn_positions_angles(const bn_positions *positions, size_t table, int32_t position,
                         float *angle);

/* A head of a query or a key, turned. */
void bn_positions_rotate(float *head, const float *angle, size_t dim);

#endif
