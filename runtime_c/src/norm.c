/* SPDX-License-Identifier: MIT
 *
 * norm.c: see norm.h.
 */
#include "norm.h"

#include <math.h>

static bn_norm make(const bn_config *c, const float *gain, const float *bias) {
    return (bn_norm){.gain = gain, .bias = bias, .kind = c->norm, .eps = c->norm_eps};
}

bn_norm bn_norm_of_expert(const bn_file *file, uint32_t stack, uint32_t layer, uint32_t role,
                          uint32_t expert) {
    const bn_tensor t = bn_file_tensor(file, stack, layer, role, expert);
    return make(&file->stacks[stack], (const float *)(const void *)t.data, t.bias);
}

bn_norm bn_norm_read(const bn_file *file, uint32_t stack, uint32_t layer, uint32_t role) {
    return bn_norm_of_expert(file, stack, layer, role, BN_NO_EXPERT);
}

bn_norm bn_norm_before(const bn_tensor *linear, const bn_config *c) {
    return make(c, linear->norm, linear->norm_bias);
}

static int copy(float *y, const float *x, size_t n) {
    int finite = 1;
    for (size_t i = 0; i < n; i++) {
        finite &= isfinite(x[i]) != 0;
        y[i] = x[i];
    }
    return finite;
}

int bn_norm_row(const bn_kernels *kernels, const bn_norm *norm, float *y, const float *x,
                size_t n) {
    return norm->gain ? bn_norm_rows(kernels, norm, y, n, x, n, n, 1) : copy(y, x, n);
}

int bn_norm_rows(const bn_kernels *kernels, const bn_norm *norm, float *y, size_t y_stride,
                 const float *x, size_t x_stride, size_t n, size_t rows) {
    bn_normalize *const normalize =
        norm->kind == BN_NORM_LAYER ? kernels->vectors.layer_norm : kernels->vectors.rms_norm;
    return normalize(&(bn_norming){.y = y,
                                   .x = x,
                                   .y_stride = y_stride,
                                   .x_stride = x_stride,
                                   .gain = norm->gain,
                                   .bias = norm->bias,
                                   .n = n,
                                   .rows = rows,
                                   .eps = norm->eps});
}
