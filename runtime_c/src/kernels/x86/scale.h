/* SPDX-License-Identifier: MIT
 *
 * scale.h: elementwise scaling of a product's sums, shared by the x86 tiers: each output is read
 * and written once.
 */
#ifndef BITNET_X86_SCALE_H
#define BITNET_X86_SCALE_H

#include "register.h"

/* Values shared by the outputs of a token. */
typedef struct token_scale {
    int32_t offset;
    float s;
    vec factor; /* if there is one scale */
} token_scale;

INLINE token_scale scale_of(const bn_scaling *a, size_t t) {
    return (token_scale){a->q_sums ? a->q_sums[t] : 0, a->s[t], vec_set(*a->scales / a->s[t])};
}

/* A plain load where n is the constant LANES. */
INLINE vec load_part(const float *p, size_t n) {
    return n == LANES ? vec_load(p) : vec_load_first(p, n);
}

/* The rule: v = (acc - offset) * factor + bias, or before + v * weight. */
INLINE vec scaled_sums(const bn_scaling *a, sums acc, int32_t offset, vec factor, vec bias,
                       vec before) {
    vec v = vec_mul(vec_from_int(acc - offset), factor);
    if (a->bias)
        v = vec_add(v, bias);
    return a->accumulate ? vec_add(before, vec_mul(v, vec_set(a->weight))) : v;
}

/* Outputs i to i + n - 1, n <= LANES; y points to output i. */
INLINE vec scaled_part(const bn_scaling *a, size_t i, const float *y, sums acc, token_scale of,
                       size_t n) {
    if (a->scale_each)
        of.factor = vec_div(load_part(a->scales + i, n), vec_set(of.s));
    return scaled_sums(a, acc, of.offset, of.factor,
                       a->bias ? load_part(a->bias + i, n) : vec_zero(),
                       a->accumulate ? load_part(y, n) : vec_zero());
}

INLINE vec scaled(const bn_scaling *a, size_t i, const float *y, sums acc, token_scale of) {
    return scaled_part(a, i, y, acc, of, LANES);
}

/* Outputs i to i + LANES - 1, or as many as there are, of `tokens` <= LANES tokens from t on.
 * acc: [tokens][LANES] */
INLINE void scale_tile(const bn_scaling *all, size_t t, size_t tokens, size_t i,
                       const int32_t *acc) {
    const bn_scaling a = *all; /* local copy: stores cannot alias it */
    if (i >= a.n)
        return;
    const size_t n = a.n - i;
    const vec bias = a.bias ? vec_load_first(a.bias + i, n) : vec_zero();
    const vec each = a.scale_each ? vec_load_first(a.scales + i, n) : vec_zero();
    float *y = a.y + t * a.y_stride + i, factors[LANES];
    vec_store(factors, vec_div(vec_set(*a.scales), vec_load_first(a.s + t, tokens)));
    for (size_t r = 0; r < tokens; r++, y += a.y_stride) {
        const vec factor = a.scale_each ? vec_div(each, vec_set(a.s[t + r])) : vec_set(factors[r]);
        const vec before = a.accumulate ? vec_load_first(y, n) : vec_zero();
        const int32_t offset = a.q_sums ? a.q_sums[t + r] : 0;
        vec_store_first(
            y, scaled_sums(&a, sums_load(acc + r * LANES), offset, factor, bias, before), n);
    }
}

/* Scales the outputs from `first` on. */
INLINE void scale_from(const bn_scaling *all, size_t first) {
    const bn_scaling a = *all; /* local copy: stores cannot alias it */
    for (size_t t = 0; t < a.tokens; t++) {
        const token_scale of = scale_of(&a, t);
        const int32_t *acc = a.acc + t * a.acc_stride;
        float *y = a.y + t * a.y_stride;
        size_t i = first;
        for (; i + LANES <= a.n; i += LANES)
            vec_store(y + i, scaled(&a, i, y + i, sums_load(acc + i), of));
        if (i < a.n) {
            const vec end = vec_load_first((const float *)(const void *)(acc + i), a.n - i);
            vec_store_first(y + i, scaled_part(&a, i, y + i, (sums)end, of, a.n - i), a.n - i);
        }
    }
}

INLINE void scale_sums(const bn_scaling *a) {
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
