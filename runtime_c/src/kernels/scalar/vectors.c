/* SPDX-License-Identifier: MIT
 *
 * vectors.c: see vectors.h.
 */
#include "scalar.h"

#include "../noise.h"

static void scale_sums(const bn_scaling *a) {
    for (size_t t = 0; t < a->tokens; t++) {
        const int32_t *acc = a->acc + t * a->acc_stride, offset = a->q_sums ? a->q_sums[t] : 0;
        float *y = a->y + t * a->y_stride;
        for (size_t i = 0; i < a->n; i++) {
            float v = (float)(acc[i] - offset) * (a->scales[a->scale_each ? i : 0] / a->s[t]);
            if (a->bias)
                v += a->bias[i];
            y[i] = a->accumulate ? y[i] + v * a->weight : v;
        }
    }
}

static void add_to(float *y, const float *x, float weight, size_t n) {
    for (size_t i = 0; i < n; i++)
        y[i] += x[i] * weight;
}

/* One row. */
static float quantize_row(int8_t *q, int32_t *sum, const float *x, size_t n) {
    float largest = 1e-5f;
    for (size_t i = 0; i < n; i++)
        largest = fabsf(x[i]) > largest || isnan(x[i]) ? fabsf(x[i]) : largest;
    const float s = 127.0f / largest;
    int32_t total = 0;
    for (size_t i = 0; i < n; i++) {
        float v = x[i] * s;
        v = v > -127.0f ? v : -127.0f; /* NaN becomes -127: converting it would be undefined */
        v = v < 127.0f ? v : 127.0f;
        q[i] = (int8_t)rintf(v);
        total += q[i];
    }
    memset(q + n, 0, bn_q_row(n) - n);
    *sum = total;
    return s;
}

static void quantize(const bn_quantizing *a) {
    for (size_t r = 0; r < a->rows; r++)
        a->s[r] = quantize_row(a->q + r * a->q_stride, &a->sums[r], a->x + r * a->x_stride, a->n);
}

/* One row. */
static int normalize(const bn_norming *a, float *y, const float *x) {
    const float sum = dot_f32(x, x, a->n);
    const float r = 1.0f / sqrtf(sum / (float)a->n + a->eps);
    for (size_t i = 0; i < a->n; i++) {
        const float v = x[i] * r * a->gain[i];
        y[i] = a->bias ? v + a->bias[i] : v;
    }
    return isfinite(sum) != 0;
}

static int rms_norm(const bn_norming *a) {
    int finite = 1;
    for (size_t row = 0; row < a->rows; row++)
        finite &= normalize(a, a->y + row * a->y_stride, a->x + row * a->x_stride);
    return finite;
}

static int layer_norm(const bn_norming *a) {
    int finite = 1;
    for (size_t row = 0; row < a->rows; row++) {
        const float *x = a->x + row * a->x_stride;
        float *y = a->y + row * a->y_stride, lane[BN_LANES] = {0};
        for (size_t i = 0; i < a->n; i++)
            lane[i % BN_LANES] += x[i];
        const float mean = tree(lane) / (float)a->n;
        for (size_t i = 0; i < a->n; i++)
            y[i] = x[i] - mean;
        finite &= normalize(a, y, y);
    }
    return finite;
}

static float max_of(const float *x, size_t n) {
    float m = -INFINITY;
    for (size_t i = 0; i < n; i++)
        m = x[i] > m ? x[i] : m;
    return m;
}

static size_t reaching(uint32_t *list, const float *x, float bar, size_t n) {
    size_t listed = 0;
    for (size_t i = 0; i < n; i++)
        if (!(x[i] < bar))
            list[listed++] = (uint32_t)i;
    return listed;
}

static void estimate(const bn_estimates *a) {
    for (size_t i = 0; i < a->n; i++)
        a->y[i] = bn_estimated(a, i);
}

static size_t may_reach(uint32_t *list, const bn_estimates *a, float bar) {
    size_t listed = 0;
    for (size_t i = 0; i < a->n; i++)
        if (!(bn_at_most(a, i) < bar))
            list[listed++] = (uint32_t)i;
    return listed;
}

static void noise(double *u, const uint32_t *tokens, size_t n, uint64_t seed, uint32_t position) {
    bn_noise at = bn_noise_at(seed, position);
    for (size_t i = 0; i < n; i++)
        u[i] = bn_noise_of(&at, tokens[i]);
}

float bn_exp(float x) {
    if (isnan(x))
        return x;
    x = x > BN_EXP_LO ? x : BN_EXP_LO;
    x = x < BN_EXP_HI ? x : BN_EXP_HI;
    const float n = rintf(x * BN_LOG2E);
    float r = fmaf(n, -BN_LN2_HI, x);
    r = fmaf(n, -BN_LN2_LO, r);
    float p = BN_EXP_C6;
    p = fmaf(p, r, BN_EXP_C5);
    p = fmaf(p, r, BN_EXP_C4);
    p = fmaf(p, r, BN_EXP_C3);
    p = fmaf(p, r, BN_EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t bits;
    memcpy(&bits, &p, sizeof bits);
    bits += (int32_t)n * (1 << 23);
    memcpy(&p, &bits, sizeof p);
    return p;
}

static float exp_sum(float *x, size_t n, float shift) {
    float lane[BN_LANES] = {0};
    for (size_t i = 0; i < n; i++) {
        x[i] = bn_exp(x[i] - shift);
        lane[i % BN_LANES] += x[i];
    }
    return tree(lane);
}

static void silu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++)
        h[i] = g[i] / (1.0f + bn_exp(-g[i])) * u[i];
}

static float positive(float g) {
    return g <= 0.0f ? 0.0f : g; /* NaN stays */
}

static void relu2_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float r = positive(g[i]);
        h[i] = r * r * u[i];
    }
}

static void gelu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float z2 = g[i] * fmaf(BN_GELU_C1, g[i] * g[i], BN_GELU_C0);
        h[i] = g[i] / (1.0f + bn_exp(-z2)) * u[i];
    }
}

static void relu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++)
        h[i] = positive(g[i]) * u[i];
}

static void gelu_erf_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float a = fabsf(g[i]) < BN_GELU_ERF_MOST ? fabsf(g[i]) : BN_GELU_ERF_MOST;
        float log_tail = bn_gelu_erf[BN_GELU_ERF_DEGREE];
        for (int k = BN_GELU_ERF_DEGREE - 1; k >= 0; k--)
            log_tail = fmaf(log_tail, a, bn_gelu_erf[k]);
        h[i] = fmaf(-a, bn_exp(log_tail), positive(g[i])) * u[i];
    }
}

const bn_vector_kernels bn_scalar_vectors = {
    .scale_sums = scale_sums,
    .add = add_to,
    .quantize = quantize,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .max = max_of,
    .reaching = reaching,
    .estimate = estimate,
    .may_reach = may_reach,
    .noise = noise,
    .exp_sum = exp_sum,
    .relu2_gate = relu2_gate,
    .silu_gate = silu_gate,
    .gelu_gate = gelu_gate,
    .relu_gate = relu_gate,
    .gelu_erf_gate = gelu_erf_gate,
};
