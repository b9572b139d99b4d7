/* SPDX-License-Identifier: MIT
 *
 * scale.h: what follows a product, element by element, the same for every x86 tier: each output is
 * read and written once.
 */
#ifndef BITNET_X86_SCALE_H
#define BITNET_X86_SCALE_H

#include "../scaled.h"
#include "register.h"

/* The register of outputs from i on. */
INLINE vec scaled(const bn_scaling *a, size_t i, sums acc, vec factor) {
    if (a->scale_each)
        factor = vec_div(vec_load(a->scales + i), vec_set(a->s));
    vec v = vec_mul(vec_from_int(acc - a->offset), factor);
    if (a->bias)
        v = vec_add(v, vec_load(a->bias + i));
    return a->accumulate ? vec_add(vec_load(a->y + i), vec_mul(v, vec_set(a->weight))) : v;
}

/* The last n < LANES outputs, padded. */
INLINE void scale_end(const bn_scaling *all, vec factor) {
    float y[LANES] = {0}, scales[LANES] = {0}, bias[LANES] = {0};
    int32_t acc[LANES] = {0};
    bn_scaling a = *all;
    memcpy(acc, a.acc, a.n * sizeof *acc);
    memcpy(y, a.y, a.n * sizeof *y);
    if (a.scale_each)
        a.scales = memcpy(scales, a.scales, a.n * sizeof *scales);
    if (a.bias)
        a.bias = memcpy(bias, a.bias, a.n * sizeof *bias);
    a.y = y;
    vec_store(y, scaled(&a, 0, sums_load(acc), factor));
    memcpy(all->y, y, a.n * sizeof *y);
}

/* What is left behind so many outputs. */
INLINE bn_scaling scaling_behind(const bn_scaling *a, size_t n) {
    bn_scaling rest = *a;
    rest.y += n, rest.acc += n, rest.n -= n;
    rest.scales += a->scale_each ? n : 0;
    rest.bias = a->bias ? a->bias + n : NULL;
    return rest;
}

static void scale_sums(const bn_scaling *all) {
    const bn_scaling a = *all; /* in registers: no store can change it */
    const vec factor = vec_set(*a.scales / a.s);
    size_t i = 0;
    for (; i + LANES <= a.n; i += LANES)
        vec_store(a.y + i, scaled(&a, i, sums_load(a.acc + i), factor));
    if (i < a.n) {
        const bn_scaling end = scaling_behind(&a, i);
        scale_end(&end, factor);
    }
}

INLINE void add_to(float *y, const float *x, float weight, size_t n) {
    const vec w = vec_set(weight);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        vec_store(y + i, vec_add(vec_load(y + i), vec_mul(vec_load(x + i), w)));
    for (; i < n; i++)
        y[i] += x[i] * weight;
}

#endif
