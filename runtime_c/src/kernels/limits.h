/* SPDX-License-Identifier: MIT
 *
 * limits.h: single measurements of the two hardware limits, for benchmarks that interleave them
 * with their own (benchmarks/passes.c); bn_measure_... report the best of several.
 */
#ifndef BITNET_LIMITS_H
#define BITNET_LIMITS_H

#include "kernels.h"
#include "system/threads.h"

enum { BN_READ_UNIT = 256 };

/* Bytes read per second. size is a multiple of BN_READ_UNIT. */
double bn_read_rate(bn_pool *pool, const uint8_t *bytes, size_t size);

/* Int8 multiply-adds per second over `items` work items of a few microseconds each. */
double bn_int8_rate(const bn_kernels *kernels, bn_pool *pool, size_t items);

#endif
