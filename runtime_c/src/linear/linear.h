/* SPDX-License-Identifier: MIT
 *
 * linear.h: y = W·x for every encoding of W.
 */
#ifndef BITNET_LINEAR_H
#define BITNET_LINEAR_H

#include "operands.h"

/* Compute products of rows [first, first + rows) of the operands, those with lines after the
 * others. All threads. */
void bn_linear(const bn_operands *o, size_t first, size_t rows, const bn_product *products,
               int n_products);

/* The same of several groups, in as many runs of the threads as one takes; but each product with
 * lines has a run of its own. */
void bn_linear_groups(const bn_operands *o, bn_group *groups, size_t n_groups);

/* One product without lines, by the calling thread alone. */
void bn_linear_alone(const bn_operands *o, int32_t thread, size_t first, size_t rows,
                     const bn_product *product);

#endif
