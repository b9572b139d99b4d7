/* SPDX-License-Identifier: MIT
 *
 * scale.h: how the integer sums of a product become floats: here, once, so that all encodings and
 * tiers share it.
 */
#ifndef BITNET_SCALE_H
#define BITNET_SCALE_H

#include "operands.h"

/* Outputs of n panels from r0 on that the matrix has: the last panel may not be full. */
static inline size_t bn_rows_of(const bn_tensor *t, size_t r0, size_t n) {
    return r0 + n * BN_PANEL <= t->rows ? n * BN_PANEL : t->rows - r0;
}

/* Put n values of product row b into place, output rows r0 on. They are lost. */
void bn_emit(const bn_operands *o, const bn_product *p, size_t b, size_t r0, size_t n,
             float *value);

/* Product row b from row `row` of the operands, outputs [r0, r0 + n): y = (acc - offset·Σq)·(γ/s).
 */
bn_scaling bn_scaling_of(const bn_operands *o, size_t row, const bn_product *p, size_t b,
                         const int32_t *acc, int32_t offset, size_t r0, size_t n);

/* And done. */
void bn_scale_sums(const bn_operands *o, size_t row, const bn_product *p, size_t b,
                   const int32_t *acc, int32_t offset, size_t r0, size_t n);

/* The same of all rows; acc: [rows][BN_CHUNK_ROWS]. */
void bn_scale_all(const bn_input *in, const bn_product *p, const int32_t *acc, int32_t offset,
                  size_t r0, size_t n);

#endif
