/* SPDX-License-Identifier: MIT
 *
 * scale.h: what follows a product, element by element, the same for every x86 tier: each output is
 * read and written once.
 */
#ifndef BITNET_X86_SCALE_H
#define BITNET_X86_SCALE_H

#include "register.h"

/* The register of outputs from i on. */
INLINE vec scaled(const bn_scaling *a, size_t i, vec factor) {
    const vec sum = vec_from_int(sums_load(a->acc + i) - a->offset);
    if (a->scale_each)
        factor = vec_div(vec_load(a->scales + i), vec_set(a->s));
    vec v = vec_mul(sum, factor);
    if (a->bias)
        v = vec_add(v, vec_load(a->bias + i));
    return a->accumulate ? vec_add(vec_load(a->y + i), vec_mul(v, vec_set(a->weight))) : v;
}

/* The last n < LANES outputs, padded. */
static void scale_end(const bn_scaling *all, vec factor) {
    float y[LANES] = {0}, scales[LANES] = {0}, bias[LANES] = {0};
    int32_t acc[LANES] = {0};
    bn_scaling a = *all;
    memcpy(acc, a.acc, a.n * sizeof *acc);
    memcpy(y, a.y, a.n * sizeof *y);
    if (a.scale_each)
        a.scales = memcpy(scales, a.scales, a.n * sizeof *scales);
    if (a.bias)
        a.bias = memcpy(bias, a.bias, a.n * sizeof *bias);
    a.acc = acc, a.y = y;
    vec_store(y, scaled(&a, 0, factor));
    memcpy(all->y, y, a.n * sizeof *y);
}

static void scale_sums(const bn_scaling *all) {
    bn_scaling a = *all; /* in registers: no store can change it */
    const vec factor = vec_set(*a.scales / a.s);
    const size_t whole = a.n / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES)
        vec_store(a.y + i, scaled(&a, i, factor));
    a.y += whole, a.acc += whole, a.n -= whole;
    a.scales += a.scale_each ? whole : 0;
    a.bias = a.bias ? a.bias + whole : NULL;
    if (a.n > 0)
        scale_end(&a, factor);
}

static void add_to(float *y, const float *x, float weight, size_t n) {
    const vec w = vec_set(weight);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        vec_store(y + i, vec_add(vec_load(y + i), vec_mul(vec_load(x + i), w)));
    for (; i < n; i++)
        y[i] += x[i] * weight;
}

#endif
