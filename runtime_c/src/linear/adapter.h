/* SPDX-License-Identifier: MIT
 *
 * adapter.h: what low-rank adapters add to products, which may differ between rows:
 *
 *     y += outᵀ · (in · q)        q: the quantized input
 *
 * Each row uses the adapter of its text, or none, so texts with different adapters share a pass.
 * in · q is an exact sum, and outᵀ · t has the order of int8_add_rows (kernels/products.h): results
 * do not depend on which rows are batched or how they are split among threads.
 */
#ifndef BITNET_ADAPTER_H
#define BITNET_ADAPTER_H

#include "operands.h"

/* The adapter of one linear: int8 in [rank][inputs] and out [rank][outputs], rows of bn_int8_row
 * bytes, each with a scale. in is NULL if this linear has none. */
typedef struct bn_low_rank {
    const int8_t *in, *out;
    const float *in_scales, *out_scales;
} bn_low_rank;

typedef struct bn_adapter {
    uint32_t rank;
    bn_low_rank *linears; /* by bn_tensor.number */
} bn_adapter;

/* First half, t = in · q for all products and rows of the groups: bn_low_items returns the number
 * of items, which any thread may compute with bn_lower while others compute the products. */
size_t bn_low_items(const bn_operands *o, const bn_group *groups, size_t n_groups);
void bn_lower(const bn_operands *o, const bn_group *groups, size_t n_groups, size_t first,
              size_t end);

/* Second half, y += outᵀ · t, for the products of each group that are computed together, the
 * others, or all: first the model's own adapter, then those of the rows. Runs on all threads. */
typedef enum bn_which { BN_TOGETHER, BN_APART, BN_ALL } bn_which;
void bn_raise(const bn_operands *o, const bn_group *groups, size_t n_groups, bn_which which);

#endif
