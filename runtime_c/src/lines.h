/* SPDX-License-Identifier: MIT
 *
 * lines.h: products with matrices stored as lines, of which only those that matter are read.
 */
#ifndef BITNET_LINES_H
#define BITNET_LINES_H

#include "linear.h"

static inline int bn_has_lines(const bn_tensor *t) {
    return t->encoding == BN_TERNARY_2BIT_ROWS || t->encoding == BN_TERNARY_2BIT_COLUMNS;
}

/* bn_linear of one product that has lines. */
void bn_linear_lines(const bn_model *m, const bn_workspace *w, size_t first, size_t rows,
                     const bn_product *product);

#endif
