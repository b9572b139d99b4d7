/* SPDX-License-Identifier: MIT
 *
 * rows.h: matrices stored row by row, F32, F16, INT8_ROWS and the codes of INT8_SKETCH; see
 * encodings.h.
 */
#ifndef BITNET_ROWS_H
#define BITNET_ROWS_H

#include "operands.h"

/* Bytes of a row of n int8 codes. */
static inline size_t bn_int8_row(size_t n) {
    return bn_round_up(n, BN_INT8_UNIT);
}

void bn_multiply_f32(const bn_input *in, const bn_product *p, size_t panel, size_t n, int32_t *acc);
void bn_multiply_f16(const bn_input *in, const bn_product *p, size_t panel, size_t n, int32_t *acc);
void bn_multiply_int8(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                      int32_t *acc);

void bn_row_f32(const bn_kernels *kernels, const bn_tensor *t, size_t row, float *x);
void bn_row_f16(const bn_kernels *kernels, const bn_tensor *t, size_t row, float *x);
void bn_row_int8(const bn_kernels *kernels, const bn_tensor *t, size_t row, float *x);

/* y[i] = row list[i] of an int8 matrix without a bias times row 0 of the operands, by the calling
 * thread. */
void bn_linear_int8_rows(const bn_operands *o, const bn_tensor *t, const uint32_t *list, size_t n,
                         float *y);

#endif
