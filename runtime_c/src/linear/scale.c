/* SPDX-License-Identifier: MIT
 *
 * scale.c: from integer sums to the floats of a product.
 */
#include "scale.h"

#include <string.h>

void bn_emit(const bn_operands *o, const bn_product *p, size_t b, size_t r0, size_t n,
             float *value) {
    float *y = p->y + b * p->y_stride + r0;
    if (p->w->bias)
        o->kernels->vectors.add(value, p->w->bias + r0, 1, n);
    if (p->accumulate)
        o->kernels->vectors.add(y, value, p->scale, n);
    else
        memcpy(y, value, n * sizeof *y);
}

bn_scaling bn_scaling_of(const bn_operands *o, size_t row, const bn_product *p, size_t b,
                         const int32_t *acc, int32_t offset, size_t r0, size_t n) {
    const bn_tensor *t = p->w;
    const int each = t->scale_scope != BN_SCALE_TENSOR;
    return (bn_scaling){.y = p->y + b * p->y_stride + r0,
                        .acc = acc,
                        .offset = offset * o->q_sum[row],
                        .scale_each = each,
                        .scales = t->scales + (each ? r0 : 0),
                        .s = o->s[row],
                        .bias = t->bias ? t->bias + r0 : NULL,
                        .accumulate = p->accumulate,
                        .weight = p->scale,
                        .n = n};
}

void bn_scale_sums(const bn_operands *o, size_t row, const bn_product *p, size_t b,
                   const int32_t *acc, int32_t offset, size_t r0, size_t n) {
    const bn_scaling a = bn_scaling_of(o, row, p, b, acc, offset, r0, n);
    o->kernels->vectors.scale_sums(&a);
}

void bn_scale_all(const bn_input *in, const bn_product *p, const int32_t *acc, int32_t offset,
                  size_t r0, size_t n) {
    for (size_t b = 0; b < in->rows; b++, acc += BN_CHUNK_ROWS)
        bn_scale_sums(in->o, in->first + b, p, b, acc, offset, r0, n);
}
