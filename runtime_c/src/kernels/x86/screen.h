/* SPDX-License-Identifier: MIT
 *
 * screen.h: estimates of logits, and search for values that reach a bar; shared by the x86 tiers.
 */
#ifndef BITNET_X86_SCREEN_H
#define BITNET_X86_SCREEN_H

#include "scale.h"

static void estimate(const bn_estimates *all) {
    const bn_estimates a = *all; /* local copy: stores cannot alias it */
    const vec mean = vec_set(a.mean), unit = vec_set(a.unit);
    size_t i = 0;
    for (; i + LANES <= a.n; i += LANES) {
        const vec over = vec_sub(vec_from_int(sums_load(a.acc + i)), mean);
        const vec scale = vec_mul(vec_load(a.scales + i), unit);
        vec_store(a.y + i, vec_mul(vec_mul(over, vec_load(a.step + i)), scale));
    }
    for (; i < a.n; i++)
        a.y[i] = bn_estimated(&a, i);
}

/* The list is never longer than the values examined, so the indices of a whole register always
 * fit. */
static size_t reaching(uint32_t *list, const float *x, float bar, size_t n) {
    const vec least = vec_set(bar);
    size_t listed = 0, i = 0;
    for (; i + LANES <= n; i += LANES)
        listed += vec_reaching(list + listed, i, vec_load(x + i), least);
    for (; i < n; i++)
        if (!(x[i] < bar))
            list[listed++] = (uint32_t)i;
    return listed;
}

static size_t may_reach(uint32_t *list, const bn_estimates *a, float bar) {
    const vec rounding = vec_set(a->rounding), noise = vec_set(a->noise), least = vec_set(bar);
    size_t listed = 0, i = 0;
    for (; i + LANES <= a->n; i += LANES) {
        const vec deviation = vec_add(vec_load(a->deviation + i), rounding);
        const vec off = vec_mul(vec_mul(deviation, vec_load(a->scales + i)), noise);
        listed += vec_reaching(list + listed, i, vec_add(vec_load(a->y + i), off), least);
    }
    for (; i < a->n; i++)
        if (!(bn_at_most(a, i) < bar))
            list[listed++] = (uint32_t)i;
    return listed;
}

#endif
