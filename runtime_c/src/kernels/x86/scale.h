/* SPDX-License-Identifier: MIT
 *
 * scale.h: what follows a product, element by element, the same for every x86 tier: each output is
 * read and written once.
 */
#ifndef BITNET_X86_SCALE_H
#define BITNET_X86_SCALE_H

#include "register.h"

/* What the outputs of a token share. */
typedef struct token_scale {
    int32_t offset;
    float s;
    vec factor; /* if there is one scale */
} token_scale;

INLINE token_scale scale_of(const bn_scaling *a, size_t t) {
    return (token_scale){a->q_sums ? a->q_sums[t] : 0, a->s[t], vec_set(*a->scales / a->s[t])};
}

/* The register of outputs from i on, which are at y. */
INLINE vec scaled(const bn_scaling *a, size_t i, const float *y, sums acc, token_scale of) {
    if (a->scale_each)
        of.factor = vec_div(vec_load(a->scales + i), vec_set(of.s));
    vec v = vec_mul(vec_from_int(acc - of.offset), of.factor);
    if (a->bias)
        v = vec_add(v, vec_load(a->bias + i));
    return a->accumulate ? vec_add(vec_load(y), vec_mul(v, vec_set(a->weight))) : v;
}

/* The last outputs, fewer than LANES, from i on, padded. */
INLINE void scale_end(const bn_scaling *all, size_t i, float *to, const int32_t *from,
                      token_scale of) {
    float y[LANES] = {0}, scales[LANES] = {0}, bias[LANES] = {0};
    int32_t acc[LANES] = {0};
    const size_t n = all->n - i;
    bn_scaling a = *all;
    memcpy(acc, from, n * sizeof *acc);
    memcpy(y, to, n * sizeof *y);
    if (a.scale_each)
        a.scales = memcpy(scales, a.scales + i, n * sizeof *scales);
    if (a.bias)
        a.bias = memcpy(bias, a.bias + i, n * sizeof *bias);
    vec_store(y, scaled(&a, 0, y, sums_load(acc), of));
    memcpy(to, y, n * sizeof *y);
}

/* Outputs from `first` on. */
INLINE void scale_from(const bn_scaling *all, size_t first) {
    const bn_scaling a = *all; /* in registers: no store can change it */
    for (size_t t = 0; t < a.tokens; t++) {
        const token_scale of = scale_of(&a, t);
        const int32_t *acc = a.acc + t * a.acc_stride;
        float *y = a.y + t * a.y_stride;
        size_t i = first;
        for (; i + LANES <= a.n; i += LANES)
            vec_store(y + i, scaled(&a, i, y + i, sums_load(acc + i), of));
        if (i < a.n)
            scale_end(&a, i, y + i, acc + i, of);
    }
}

static void scale_sums(const bn_scaling *a) {
    scale_from(a, 0);
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
