/* SPDX-License-Identifier: MIT
 *
 * norm.c: see norm.h.
 */
#include "norm.h"

#include <math.h>

bn_norm bn_norm_of_expert(const bn_file *file, uint32_t stack, uint32_t layer, uint32_t role,
                          uint32_t expert) {
    const bn_tensor t = bn_file_tensor(file, stack, layer, role, expert);
    return (bn_norm){(const float *)(const void *)t.data, file->stacks[stack].norm_eps};
}

bn_norm bn_norm_read(const bn_file *file, uint32_t stack, uint32_t layer, uint32_t role) {
    return bn_norm_of_expert(file, stack, layer, role, BN_NO_EXPERT);
}

bn_norm bn_norm_before(const bn_tensor *linear, const bn_config *c) {
    return (bn_norm){linear->norm, c->norm_eps};
}

int bn_norm_row(const bn_kernels *kernels, const bn_norm *norm, float *y, const float *x,
                size_t n) {
    return isfinite(kernels->vectors.rms_norm(y, x, norm->gain, n, norm->eps)) != 0;
}
