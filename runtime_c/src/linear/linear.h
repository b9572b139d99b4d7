/* SPDX-License-Identifier: MIT
 *
 * linear.h: y = W·x for every encoding of W.
 */
#ifndef BITNET_LINEAR_H
#define BITNET_LINEAR_H

#include "operands.h"

/* Computes products of rows [first, first + rows) of the operands, those stored as lines after the
 * others. Runs on all threads. */
void bn_linear(const bn_operands *o, size_t first, size_t rows, const bn_product *products,
               int n_products);

/* The same for several groups, in as many runs of the pool as for one group, except that each
 * product stored as lines has its own run. */
void bn_linear_groups(const bn_operands *o, bn_group *groups, size_t n_groups);

/* One product that is not stored as lines, by the calling thread alone, as number `thread`. */
void bn_linear_alone(const bn_operands *o, int32_t thread, size_t first, size_t rows,
                     const bn_product *product);

#endif
