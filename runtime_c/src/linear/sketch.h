/* SPDX-License-Identifier: MIT
 *
 * sketch.h: where the parts of an INT8_SKETCH tensor are, and whether they are right.
 */
#ifndef BITNET_SKETCH_H
#define BITNET_SKETCH_H

#include "kernels/kernels.h"
#include "system/threads.h"

/* Where its parts begin, in bytes; the codes are at 0. Of a size that is not too large. */
typedef struct bn_sketch_parts {
    uint64_t tiles, step, deviation;
} bn_sketch_parts;
bn_sketch_parts bn_sketch_at(uint64_t rows, uint64_t cols);

/* Bytes of steps and deviations; returns 0 on overflow. */
int bn_steps_size(uint64_t rows, uint64_t cols, uint64_t *size);

/* The first row whose sketch, step or deviation is not that of its codes, or `rows`. */
size_t bn_wrong_sketch(const uint8_t *data, size_t rows, size_t cols, const bn_kernels *kernels,
                       bn_pool *pool);

#endif
