/* SPDX-License-Identifier: MIT
 *
 * lookup.h: products by tables of sums, for many tokens at once.
 */
#ifndef BITNET_LOOKUP_H
#define BITNET_LOOKUP_H

#include "products.h"

/* bn_linear of the first rows, as many as tables are good for. Returns how many: 0 for most. */
size_t bn_linear_lookup(const bn_input *in, const bn_product *products, int n_products);

#endif
