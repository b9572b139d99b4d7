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

/* How codes are stored: as T, or as T + 1. */
typedef enum bn_codes { BN_AS_THEY_ARE, BN_ONE_MORE } bn_codes;

/* Outputs [r0, r0 + n) of all rows from their sums, which begin acc_stride apart. */
bn_scaling bn_scaling_of(const bn_input *in, const bn_product *p, const int32_t *acc,
                         size_t acc_stride, bn_codes codes, size_t r0, size_t n);

/* And done. */
void bn_scale_sums(const bn_input *in, const bn_product *p, const int32_t *acc, size_t acc_stride,
                   bn_codes codes, size_t r0, size_t n);

#endif
