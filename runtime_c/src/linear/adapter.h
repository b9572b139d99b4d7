/* SPDX-License-Identifier: MIT
 *
 * adapter.h: what adapters add to products, for some rows and not for others:
 *
 *     y += outᵀ · (in · q)        q: the quantized input
 *
 * Each row has the adapter of its text, or none, so texts with different ones share a pass. in · q
 * is an exact sum, outᵀ · t has the order of int8_add_rows (kernels/products.h): nothing depends on
 * which rows come together, nor on how they are cut among threads.
 */
#ifndef BITNET_ADAPTER_H
#define BITNET_ADAPTER_H

#include "operands.h"

/* Of one linear: int8 [rank][inputs] and [rank][outputs], rows of bn_int8_row bytes, each with a
 * scale. NULL: it has none. */
typedef struct bn_low_rank {
    const int8_t *in, *out;
    const float *in_scales, *out_scales;
} bn_low_rank;

typedef struct bn_adapter {
    uint32_t rank;
    bn_low_rank *linears; /* by bn_tensor.number */
} bn_adapter;

/* The first half, t = in · q of all products of the groups and their rows: so many items, which any
 * thread may do, also while others compute the products. */
size_t bn_low_items(const bn_operands *o, const bn_group *groups, size_t n_groups);
void bn_lower(const bn_operands *o, const bn_group *groups, size_t n_groups, size_t first,
              size_t end);

/* The second half, y += outᵀ · t, of those products of each group that are done together, or of
 * those that are not: what the model's own adapter says, and then those of the rows. */
typedef enum bn_which { BN_TOGETHER, BN_APART, BN_ALL } bn_which;
void bn_raise(const bn_operands *o, const bn_group *groups, size_t n_groups, bn_which which);

#endif
