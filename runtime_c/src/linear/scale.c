/* SPDX-License-Identifier: MIT
 *
 * scale.c: from integer sums to the floats of a product.
 */
#include "scale.h"

#include <string.h>

void bn_emit(const bn_product *p, size_t b, size_t r0, size_t n, float *value) {
    float *y = p->y + b * p->y_stride + r0;
    if (p->w->bias)
        for (size_t r = 0; r < n; r++)
            value[r] += p->w->bias[r0 + r];
    if (p->accumulate)
        for (size_t r = 0; r < n; r++)
            y[r] += value[r] * p->scale;
    else if (value != y)
        memcpy(y, value, n * sizeof *y);
}

void bn_scale_sums(const bn_operands *o, size_t row, const bn_product *p, size_t b,
                   const int32_t *acc, int32_t offset, size_t r0, size_t n) {
    const bn_tensor *t = p->w;
    const int32_t correction = offset * o->q_sum[row];
    const float s = o->s[row];
    float sum[BN_CHUNK_ROWS], *value = p->accumulate ? sum : p->y + b * p->y_stride + r0;
    if (t->scale_scope == BN_SCALE_TENSOR) {
        const float factor = t->scales[0] / s;
        for (size_t r = 0; r < n; r++)
            value[r] = (float)(acc[r] - correction) * factor;
    } else {
        for (size_t r = 0; r < n; r++)
            value[r] = (float)(acc[r] - correction) * (t->scales[r0 + r] / s);
    }
    bn_emit(p, b, r0, n, value);
}

void bn_scale_all(const bn_input *in, const bn_product *p, const int32_t *acc, int32_t offset,
                  size_t r0, size_t n) {
    for (size_t b = 0; b < in->rows; b++, acc += BN_CHUNK_ROWS)
        bn_scale_sums(in->o, in->first + b, p, b, acc, offset, r0, n);
}
