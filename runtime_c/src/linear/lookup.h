/* SPDX-License-Identifier: MIT
 *
 * lookup.h: products by lookup tables of sums, for many tokens at once.
 */
#ifndef BITNET_LOOKUP_H
#define BITNET_LOOKUP_H

#include "operands.h"

/* Most rows of a block: their sums, 0.65 MB, stay in the L2 cache of CPUs that use tables. */
enum { BN_LOOKUP_ROWS = 3840 };

/* Multiplies the first rows of each group with its `together` products where tables pay off, and
 * sets `done` to their number, often 0. Runs on all threads. */
void bn_linear_lookup(const bn_operands *o, bn_group *groups, size_t n_groups);

#endif
