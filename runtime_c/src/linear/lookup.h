/* SPDX-License-Identifier: MIT
 *
 * lookup.h: products by tables of sums, for many tokens at once.
 */
#ifndef BITNET_LOOKUP_H
#define BITNET_LOOKUP_H

#include "operands.h"

enum {
    BN_LOOKUP_ROWS = 2560,     /* as BN_CHUNK_ROWS: their sums fill half of a usual second cache */
    BN_LOOKUP_LEAST_ROWS = 640 /* with fewer, making tables costs more than they save */
};

/* bn_linear of the first rows, as many as tables are good for. Returns how many: 0 for most. */
size_t bn_linear_lookup(const bn_input *in, const bn_product *products, int n_products);

#endif
