/* SPDX-License-Identifier: MIT
 *
 * lookup.h: products of many tokens at once, by tables of sums.
 */
#ifndef BITNET_LOOKUP_H
#define BITNET_LOOKUP_H

#include "linear.h"

enum {
    BN_LOOKUP_ROWS = 2560,     /* as BN_CHUNK_ROWS: their sums fill half of a usual second cache */
    BN_LOOKUP_LEAST_ROWS = 640 /* with fewer, making tables costs more than they save */
};

/* bn_linear of the first rows, as many as tables are good for. Returns how many: 0 for most. */
size_t bn_linear_lookup(const bn_model *m, const bn_workspace *w, size_t first, size_t rows,
                        const bn_product *products, int n_products);

#endif
