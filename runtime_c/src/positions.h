/* SPDX-License-Identifier: MIT
 *
 * positions.h: how a row knows where it stands in its text: RoPE, which turns queries and keys by
 * angles that grow with the position.
 */
#ifndef BITNET_POSITIONS_H
#define BITNET_POSITIONS_H

#include "file/file.h"

enum { BN_POSITION_TABLES = 2 }; /* of all layers, or global and local */

typedef struct bn_positions {
    size_t dim;   /* values of a head that are turned; 0: no positions */
    float factor; /* of attention, which scaled RoPE brings */
    const float *frequencies[BN_POSITION_TABLES]; /* [dim / 2], or NULL */
} bn_positions;

bn_positions bn_positions_read(const bn_file *file, uint32_t stack);

/* cos and sin of each angle of a table at this position: angle[dim]. */
void bn_positions_angles(const bn_positions *positions, size_t table, int32_t position,
                         float *angle);

/* A head of a query or a key, turned. */
void bn_positions_rotate(float *head, const float *angle, size_t dim);

#endif
