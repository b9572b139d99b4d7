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

/* Compute up to 3 products of rows [first, first + rows) of the workspace's h, q, s, those with
 * lines after the others. All threads. */
void bn_linear(const bn_model *m, const bn_workspace *w, size_t first, size_t rows,
               const bn_product *products, int n_products);

/* x[0..D) = row `token` of the embedding, times the embedding scale. */
void bn_embed(const bn_model *m, const bn_stack *stack, int32_t token, float *x);

#endif
