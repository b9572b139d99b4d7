/* SPDX-License-Identifier: MIT
 *
 * limits.h: one look at each of the two walls of the machine, for who measures beside them
 * (benchmarks/passes.c); bn_measure_... are the best of several such looks.
 */
#ifndef BITNET_LIMITS_H
#define BITNET_LIMITS_H

#include "kernels.h"
#include "system/threads.h"

enum { BN_READ_UNIT = 256 };

/* Bytes a second that are read, of a multiple of BN_READ_UNIT. */
double bn_read_rate(bn_pool *pool, const uint8_t *bytes, size_t size);

/* Int8 multiply-adds a second, in so many items of microseconds each. */
double bn_int8_rate(const bn_kernels *kernels, bn_pool *pool, size_t items);

#endif
