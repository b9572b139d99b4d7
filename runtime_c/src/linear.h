/* SPDX-License-Identifier: MIT
 *
 * linear.h: y = W·x for every encoding of W.
 */
#ifndef BITNET_LINEAR_H
#define BITNET_LINEAR_H

#include "file.h"
#include "model.h"
#include "stack.h"
#include "workspace.h"

enum { BN_CHUNK_ROWS = 128 }; /* output rows a thread computes at a time: the sums stay in cache */

/* One product of a group that shares its input: y[b][r] = W·input, or x[b][r] += scale·(W·input).
 */
typedef struct bn_product {
    const bn_tensor *w;
    float *y;
    size_t y_stride;
    const float *where; /* NULL, or as y: of what is not > 0 here, y is not asked and may be 0 */
    int32_t accumulate; /* add to what y holds */
    float scale;        /* multiplies the product when accumulating */
} bn_product;

static inline size_t bn_panels(const bn_tensor *t) {
    return ((size_t)t->rows + BN_PANEL - 1) / BN_PANEL;
}

/* The panels of a group of products form one list. Of [*first, end) in it, which is not empty, this
 * is what lies in one product: panels [*panel, *panel + *n) of it. *first goes on behind it. */
const bn_product *bn_next_part(const bn_product *products, size_t *first, size_t end, size_t *panel,
                               size_t *n);

/* Compute up to 3 products of rows [first, first + rows) of the workspace's h, q, s, those with
 * lines after the others. All threads. */
void bn_linear(const bn_model *m, const bn_workspace *w, size_t first, size_t rows,
               const bn_product *products, int n_products);

/* Bytes of a row of n int8 codes. */
static inline size_t bn_int8_row(size_t n) {
    return (n + BN_INT8_UNIT - 1) / BN_INT8_UNIT * BN_INT8_UNIT;
}

static inline int bn_is_int8(const bn_tensor *t) {
    return t->encoding == BN_INT8_ROWS || t->encoding == BN_INT8_SKETCH;
}

/* One row of a product with an int8 matrix, of row 0 alone and on the calling thread. */
void bn_linear_int8_row(const bn_model *m, const bn_workspace *w, const bn_product *product,
                        size_t row);

/* Product row b from row `row` of the workspace, outputs [r0, r0 + n), n <= BN_CHUNK_ROWS:
 * y = (acc - offset·Σq)·(γ/s). */
void bn_scale_sums(const bn_workspace *w, size_t row, const bn_product *p, size_t b,
                   const int32_t *acc, int32_t offset, size_t r0, size_t n);

/* group_sums of a row from its first `width` of q. */
void bn_sum_groups(const bn_workspace *w, size_t row, size_t width);

/* x[0..D) = row `token` of the embedding, times the embedding scale. */
void bn_embed(const bn_model *m, const bn_stack *stack, int32_t token, float *x);

#endif
