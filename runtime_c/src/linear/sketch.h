/* SPDX-License-Identifier: MIT
 *
 * sketch.h: layout and verification of INT8_SKETCH tensors.
 */
#ifndef BITNET_SKETCH_H
#define BITNET_SKETCH_H

#include "kernels/kernels.h"
#include "system/threads.h"

/* Byte offsets of the parts; the codes are at 0. The sizes must not overflow. */
typedef struct bn_sketch_parts {
    uint64_t tiles, step, deviation;
} bn_sketch_parts;
bn_sketch_parts bn_sketch_at(uint64_t rows, uint64_t cols);

/* Bytes of steps and deviations; returns 0 on overflow. */
int bn_steps_size(uint64_t rows, uint64_t cols, uint64_t *size);

/* Returns the first row whose sketch, step or deviation does not match its codes, or `rows`. pool:
 * NULL for the calling thread alone. */
size_t bn_wrong_sketch(const uint8_t *data, size_t rows, size_t cols, const bn_kernels *kernels,
                       bn_pool *pool);

#endif
