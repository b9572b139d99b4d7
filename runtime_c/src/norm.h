/* SPDX-License-Identifier: MIT
 *
 * norm.h: normalization before or after a part of a layer.
 */
#ifndef BITNET_NORM_H
#define BITNET_NORM_H

#include "file/file.h"
#include "kernels/kernels.h"

typedef struct bn_norm {
    const float *gain; /* NULL: there is no norm here */
    const float *bias; /* or NULL */
    uint32_t kind;     /* BN_NORM_RMS, BN_NORM_LAYER */
    float eps;
} bn_norm;

/* A norm of a layer, or one outside the layers. */
bn_norm bn_norm_read(const bn_file *file, uint32_t stack, uint32_t layer, uint32_t role);

/* A norm of an expert. */
bn_norm bn_norm_of_expert(const bn_file *file, uint32_t stack, uint32_t layer, uint32_t role,
                          uint32_t expert);

/* The norm that a linear may have on its input (linear_norm). */
bn_norm bn_norm_before(const bn_tensor *linear, const bn_config *c);

/* y[0..n) = norm(x), or x if there is no norm; y may be x. Returns 0 if x is not finite. */
int bn_norm_row(const bn_kernels *kernels, const bn_norm *norm, float *y, const float *x, size_t n);

/* The same for several rows, faster than one by one; the norm must exist. */
int bn_norm_rows(const bn_kernels *kernels, const bn_norm *norm, float *y, size_t y_stride,
                 const float *x, size_t x_stride, size_t n, size_t rows);

#endif
