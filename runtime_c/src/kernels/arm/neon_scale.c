/* SPDX-License-Identifier: MIT
 *
 * neon_scale.c: elementwise scaling of a product's sums, and estimates of logits, for all ARM
 * tiers.
 */
#include "../kernels.h"

#if defined(__aarch64__)

#include "lanes.h"

/* acc[i] - offset as floats for n sums, at most 16; the other lanes are unused */
INLINE lanes sums_of(const int32_t *acc, size_t n, int32_t offset) {
    int32_t buffer[BN_LANES] = {0};
    lanes v;
    if (n < BN_LANES)
        acc = memcpy(buffer, acc, n * sizeof *acc);
    UNROLL
    for (int j = 0; j < 4; j++)
        v.val[j] = vcvtq_f32_s32(vsubq_s32(vld1q_s32(acc + 4 * j), vdupq_n_s32(offset)));
    return v;
}

INLINE void scale_token(const bn_scaling *a, size_t t) {
    const int32_t *acc = a->acc + t * a->acc_stride, offset = a->q_sums ? a->q_sums[t] : 0;
    const float32x4_t factor = vdupq_n_f32(*a->scales / a->s[t]), s = vdupq_n_f32(a->s[t]);
    float *y = a->y + t * a->y_stride;
    for (size_t i = 0; i < a->n; i += BN_LANES) {
        const size_t left = a->n - i;
        const lanes scale = a->scale_each ? load(a->scales + i, left) : zero();
        lanes v = sums_of(acc + i, left, offset);
        UNROLL
        for (int j = 0; j < 4; j++)
            v.val[j] = vmulq_f32(v.val[j], a->scale_each ? vdivq_f32(scale.val[j], s) : factor);
        if (a->bias)
            v = add_lanes(v, load(a->bias + i, left));
        if (a->accumulate) {
            UNROLL
            for (int j = 0; j < 4; j++)
                v.val[j] = vmulq_n_f32(v.val[j], a->weight);
            v = add_lanes(load(y + i, left), v);
        }
        store(y + i, v, left);
    }
}

void bn_neon_scale_sums(const bn_scaling *all) {
    const bn_scaling a = *all;
    for (size_t t = 0; t < a.tokens; t++)
        scale_token(&a, t);
}

static void add_to(float *y, const float *x, float weight, size_t n) {
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(x + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++)
            v.val[j] = vmulq_n_f32(v.val[j], weight);
        store(y + i, add_lanes(load(y + i, n - i), v), n - i);
    }
}

static void estimate(const bn_estimates *all) {
    const bn_estimates a = *all;
    for (size_t i = 0; i < a.n; i += BN_LANES) {
        const size_t left = a.n - i;
        const lanes step = load(a.step + i, left), scale = load(a.scales + i, left);
        lanes v = sums_of(a.acc + i, left, 0);
        UNROLL
        for (int j = 0; j < 4; j++)
            v.val[j] = vmulq_f32(vmulq_f32(vsubq_f32(v.val[j], vdupq_n_f32(a.mean)), step.val[j]),
                                 vmulq_n_f32(scale.val[j], a.unit));
        store(a.y + i, v, left);
    }
}

/* bn_at_most for elements i to i + 3. */
INLINE float32x4_t most(const bn_estimates *a, size_t i) {
    const float32x4_t deviation = vaddq_f32(vld1q_f32(a->deviation + i), vdupq_n_f32(a->rounding));
    const float32x4_t off = vmulq_n_f32(vmulq_f32(deviation, vld1q_f32(a->scales + i)), a->noise);
    return vaddq_f32(vld1q_f32(a->y + i), off);
}

/* Nearly always, none of four reaches the bar. */
static size_t may_reach(uint32_t *list, const bn_estimates *a, float bar) {
    size_t listed = 0, i = 0;
    for (; i + 4 <= a->n; i += 4) {
        const uint32x4_t is_below = vcltq_f32(most(a, i), vdupq_n_f32(bar));
        if (vminvq_u32(is_below))
            continue;
        for (uint32_t j = 0; j < 4; j++) {
            list[listed] = (uint32_t)i + j;
            listed += is_below[j] == 0;
        }
    }
    for (; i < a->n; i++)
        if (!(bn_at_most(a, i) < bar))
            list[listed++] = (uint32_t)i;
    return listed;
}

void bn_kernels_neon_scale(bn_kernels *table) {
    table->vectors.scale_sums = bn_neon_scale_sums;
    table->vectors.add = add_to;
    table->vectors.estimate = estimate;
    table->vectors.may_reach = may_reach;
}

#endif
