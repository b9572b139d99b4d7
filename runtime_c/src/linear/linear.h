/* SPDX-License-Identifier: MIT
 *
 * linear.h: y = W·x for every encoding of W.
 */
#ifndef BITNET_LINEAR_H
#define BITNET_LINEAR_H

#include "operands.h"

/* Compute up to 3 products of rows [first, first + rows) of the operands, those with lines after
 * the others. All threads. */
void bn_linear(const bn_operands *o, size_t first, size_t rows, const bn_product *products,
               int n_products);

#endif
