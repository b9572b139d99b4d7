/* SPDX-License-Identifier: MIT
 *
 * scale.c: see scale.h.
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

bn_scaling bn_scaling_of(const bn_input *in, const bn_product *p, const int32_t *acc,
                         size_t acc_stride, bn_codes codes, size_t r0, size_t n) {
    const bn_operands *o = in->o;
    const bn_tensor *t = p->w;
    const int each = t->scale_scope != BN_SCALE_TENSOR;
    return (bn_scaling){.y = p->y + r0,
                        .y_stride = p->y_stride,
                        .acc = acc,
                        .acc_stride = acc_stride,
                        .q_sums = codes == BN_ONE_MORE ? o->q_sum + in->first : NULL,
                        .s = o->s + in->first,
                        .scales = t->scales + (each ? r0 : 0),
                        .scale_each = each,
                        .accumulate = p->accumulate,
                        .bias = t->bias ? t->bias + r0 : NULL,
                        .weight = p->scale,
                        .n = n,
                        .tokens = in->rows};
}

void bn_scale_sums(const bn_input *in, const bn_product *p, const int32_t *acc, size_t acc_stride,
                   bn_codes codes, size_t r0, size_t n) {
    const bn_scaling a = bn_scaling_of(in, p, acc, acc_stride, codes, r0, n);
    in->o->kernels->vectors.scale_sums(&a);
}
