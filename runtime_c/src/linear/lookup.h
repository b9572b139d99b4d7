/* SPDX-License-Identifier: MIT
 *
 * lookup.h: products by tables of sums, for many tokens at once.
 */
#ifndef BITNET_LOOKUP_H
#define BITNET_LOOKUP_H

#include "operands.h"

enum {
    BN_LOOKUP_ROWS = 3840
}; /* their sums, 0.65 MB, stay in the second cache of those who use it */

/* Multiply the first `done` rows of each group, those that tables are good for: 0 of most. Of the
 * products, those `together`. */
void bn_linear_lookup(const bn_operands *o, bn_group *groups, size_t n_groups);

#endif
