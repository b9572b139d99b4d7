/* SPDX-License-Identifier: MIT
 *
 * neon_float.c: float kernels for all ARM tiers, except attention and scaling.
 */
#include "../kernels.h"

#if defined(__aarch64__)

#include <math.h>

#include "lanes.h"

/* --- products --- */

/* y[r] of `rows` (a constant) rows and one token; 4 rows share a load of x and hide the latency. */
INLINE void dot_rows(float *y, const void *w, size_t first, size_t cols, const float *x,
                     size_t size, const size_t rows) {
    lanes sum[4];
    UNROLL
    for (size_t r = 0; r < rows; r++)
        sum[r] = zero();
    for (size_t k = 0; k < cols; k += BN_LANES) {
        const lanes xk = load(x + k, cols - k);
        UNROLL
        for (size_t r = 0; r < rows; r++)
            sum[r] = fma_lanes(sum[r], load_as(w, first + r * cols + k, cols - k, size), xk);
    }
    UNROLL
    for (size_t r = 0; r < rows; r++)
        y[r] = tree(sum[r]);
}

INLINE void matmul(float *y, size_t y_stride, const void *w, size_t rows, size_t cols,
                   const float *x, size_t x_stride, size_t tokens, size_t size) {
    size_t r = 0;
    for (; r + 4 <= rows; r += 4)
        for (size_t t = 0; t < tokens; t++)
            dot_rows(y + t * y_stride + r, w, r * cols, cols, x + t * x_stride, size, 4);
    for (; r < rows; r++)
        for (size_t t = 0; t < tokens; t++)
            dot_rows(y + t * y_stride + r, w, r * cols, cols, x + t * x_stride, size, 1);
}

static void f32_matmul(float *y, size_t y_stride, const float *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens) {
    matmul(y, y_stride, w, rows, cols, x, x_stride, tokens, sizeof *w);
}

static void f16_matmul(float *y, size_t y_stride, const uint16_t *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens) {
    matmul(y, y_stride, w, rows, cols, x, x_stride, tokens, sizeof *w);
}

static void int8_add_rows(const bn_add_rows *a) {
    for (size_t t = 0; t < a->tokens; t++)
        for (size_t i = 0; i < a->n; i += BN_LANES) {
            float *y = a->y + t * a->y_stride + i;
            const float *x = a->x + t * a->x_stride;
            lanes s = zero(), sum = load(y, a->n - i);
            for (size_t r = 0; r < a->rank; r++) {
                const lanes w = load_int8(a->w + r * a->w_stride + i, BN_LANES);
                UNROLL
                for (int j = 0; j < 4; j++)
                    s.val[j] = vfmaq_n_f32(s.val[j], w.val[j], x[r]);
            }
            UNROLL
            for (int j = 0; j < 4; j++)
                sum.val[j] = vaddq_f32(sum.val[j], vmulq_n_f32(s.val[j], a->weight));
            store(y, sum, a->n - i);
        }
}

/* --- quantization, norms, activations --- */

INLINE float quantize_row(int8_t *q, int32_t *sum, const float *x, size_t n) {
    float32x4_t most = vdupq_n_f32(1e-5f);
    for (size_t i = 0; i < n; i += BN_LANES) {
        const lanes v = load(x + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++)
            most = vmaxq_f32(vabsq_f32(v.val[j]), most); /* NaN stays */
    }
    const float s = 127.0f / vmaxvq_f32(most);
    int32x4_t total = vdupq_n_s32(0);
    for (size_t i = 0; i < n; i += BN_LANES) {
        const lanes v = load(x + i, n - i);
        int32x4_t r[4];
        UNROLL
        for (int j = 0; j < 4; j++) { /* maxnm returns the number if one operand is NaN */
            const float32x4_t low = vmaxnmq_f32(vmulq_n_f32(v.val[j], s), vdupq_n_f32(-127));
            r[j] = vcvtnq_s32_f32(vminq_f32(low, vdupq_n_f32(127)));
            total = vaddq_s32(total, r[j]);
        }
        const int16x8_t a = vcombine_s16(vmovn_s32(r[0]), vmovn_s32(r[1]));
        const int16x8_t b = vcombine_s16(vmovn_s32(r[2]), vmovn_s32(r[3]));
        vst1q_s8(q + i, vcombine_s8(vmovn_s16(a), vmovn_s16(b))); /* a row is padded to 64 */
    }
    memset(q + n, 0, bn_q_row(n) - n);
    *sum = vaddvq_s32(total);
    return s;
}

static void quantize(const bn_quantizing *a) {
    for (size_t r = 0; r < a->rows; r++)
        a->s[r] = quantize_row(a->q + r * a->q_stride, &a->sums[r], a->x + r * a->x_stride, a->n);
}

INLINE int normalize(const bn_norming *a, float *y, const float *x) {
    lanes sums = zero();
    for (size_t i = 0; i < a->n; i += BN_LANES) {
        const lanes v = load(x + i, a->n - i);
        sums = fma_lanes(sums, v, v);
    }
    const float sum = tree(sums), r = 1.0f / sqrtf(sum / (float)a->n + a->eps);
    for (size_t i = 0; i < a->n; i += BN_LANES) {
        lanes v = load(x + i, a->n - i);
        const lanes g = load(a->gain + i, a->n - i);
        UNROLL
        for (int j = 0; j < 4; j++)
            v.val[j] = vmulq_f32(vmulq_n_f32(v.val[j], r), g.val[j]);
        store(y + i, a->bias ? add_lanes(v, load(a->bias + i, a->n - i)) : v, a->n - i);
    }
    return isfinite(sum) != 0;
}

static int rms_norm(const bn_norming *a) {
    int finite = 1;
    for (size_t row = 0; row < a->rows; row++)
        finite &= normalize(a, a->y + row * a->y_stride, a->x + row * a->x_stride);
    return finite;
}

/* y = x minus its mean */
INLINE void center(float *y, const float *x, size_t n) {
    lanes sum = zero();
    for (size_t i = 0; i < n; i += BN_LANES)
        sum = add_lanes(sum, load(x + i, n - i));
    const float32x4_t mean = vdupq_n_f32(tree(sum) / (float)n);
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(x + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++)
            v.val[j] = vsubq_f32(v.val[j], mean);
        store(y + i, v, n - i);
    }
}

static int layer_norm(const bn_norming *a) {
    int finite = 1;
    for (size_t row = 0; row < a->rows; row++) {
        float *y = a->y + row * a->y_stride;
        center(y, a->x + row * a->x_stride, a->n);
        finite &= normalize(a, y, y);
    }
    return finite;
}

static float max_of(const float *x, size_t n) {
    float32x4_t most = vdupq_n_f32(-INFINITY);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t v = vld1q_f32(x + i);
        most = vbslq_f32(vcgtq_f32(v, most), v, most);
    }
    float m = vmaxvq_f32(most);
    for (; i < n; i++)
        m = x[i] > m ? x[i] : m;
    return m;
}

INLINE float32x4_t exp4(float32x4_t x) {
    x = vminq_f32(vmaxq_f32(x, vdupq_n_f32(BN_EXP_LO)), vdupq_n_f32(BN_EXP_HI)); /* NaN stays */
    const float32x4_t n = vrndnq_f32(vmulq_n_f32(x, BN_LOG2E));
    float32x4_t r = vfmaq_f32(x, n, vdupq_n_f32(-BN_LN2_HI));
    r = vfmaq_f32(r, n, vdupq_n_f32(-BN_LN2_LO));
    float32x4_t p = vdupq_n_f32(BN_EXP_C6);
    p = vfmaq_f32(vdupq_n_f32(BN_EXP_C5), p, r);
    p = vfmaq_f32(vdupq_n_f32(BN_EXP_C4), p, r);
    p = vfmaq_f32(vdupq_n_f32(BN_EXP_C3), p, r);
    p = vfmaq_f32(vdupq_n_f32(BN_EXP_C2), p, r);
    p = vfmaq_f32(vdupq_n_f32(1), p, r);
    p = vfmaq_f32(vdupq_n_f32(1), p, r);
    const int32x4_t exponent = vshlq_n_s32(vcvtq_s32_f32(n), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), exponent));
}

static float exp_sum(float *x, size_t n, float shift) {
    lanes sum = zero();
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(x + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++)
            v.val[j] = exp4(vsubq_f32(v.val[j], vdupq_n_f32(shift)));
        store(x + i, v, n - i);
        if (n - i < BN_LANES)
            v = load(x + i, n - i); /* zeros, not exp(-shift), past the end */
        sum = add_lanes(sum, v);
    }
    return tree(sum);
}

static void silu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(g + i, n - i);
        const lanes w = load(u + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++) {
            const float32x4_t e = vaddq_f32(vdupq_n_f32(1), exp4(vnegq_f32(v.val[j])));
            v.val[j] = vmulq_f32(vdivq_f32(v.val[j], e), w.val[j]);
        }
        store(h + i, v, n - i);
    }
}

/* 0 where g <= 0, including -0; NaN stays. */
INLINE float32x4_t positive(float32x4_t g) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(g), vclezq_f32(g)));
}

static void relu2_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(g + i, n - i);
        const lanes w = load(u + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++) {
            const float32x4_t r = positive(v.val[j]);
            v.val[j] = vmulq_f32(vmulq_f32(r, r), w.val[j]);
        }
        store(h + i, v, n - i);
    }
}

static void gelu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(g + i, n - i);
        const lanes w = load(u + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++) {
            const float32x4_t x = v.val[j], square = vmulq_f32(x, x);
            const float32x4_t p =
                vfmaq_f32(vdupq_n_f32(BN_GELU_C0), vdupq_n_f32(BN_GELU_C1), square);
            const float32x4_t e = vaddq_f32(vdupq_n_f32(1), exp4(vnegq_f32(vmulq_f32(x, p))));
            v.val[j] = vmulq_f32(vdivq_f32(x, e), w.val[j]);
        }
        store(h + i, v, n - i);
    }
}

static void relu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(g + i, n - i);
        const lanes w = load(u + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++)
            v.val[j] = vmulq_f32(positive(v.val[j]), w.val[j]);
        store(h + i, v, n - i);
    }
}

static void gelu_erf_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(g + i, n - i);
        const lanes w = load(u + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++) {
            const float32x4_t a = vminq_f32(vabsq_f32(v.val[j]), vdupq_n_f32(BN_GELU_ERF_MOST));
            float32x4_t log_tail = vdupq_n_f32(bn_gelu_erf[BN_GELU_ERF_DEGREE]);
            UNROLL
            for (int k = BN_GELU_ERF_DEGREE - 1; k >= 0; k--)
                log_tail = vfmaq_f32(vdupq_n_f32(bn_gelu_erf[k]), log_tail, a);
            v.val[j] = vmulq_f32(vfmsq_f32(positive(v.val[j]), a, exp4(log_tail)), w.val[j]);
        }
        store(h + i, v, n - i);
    }
}

/* --- IEEE half --- */

static void f32_to_f16(uint16_t *y, const float *x, size_t n) {
    const float32x4_t most = vdupq_n_f32(65504);
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(x + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++) /* min and max propagate NaN */
            v.val[j] = vminq_f32(vmaxq_f32(v.val[j], vnegq_f32(most)), most);
        uint16_t half[BN_LANES];
        UNROLL
        for (int j = 0; j < 4; j++)
            vst1_u16(half + 4 * j, vreinterpret_u16_f16(vcvt_f16_f32(v.val[j])));
        memcpy(y + i, half, (n - i < BN_LANES ? n - i : BN_LANES) * sizeof *y);
    }
}

static void f16_to_f32(float *y, const uint16_t *x, size_t n) {
    for (size_t i = 0; i < n; i += BN_LANES)
        store(y + i, load_half(x + i, n - i), n - i);
}

void bn_kernels_neon_float(bn_kernels *table) {
    table->products.f32_matmul = f32_matmul;
    table->products.f16_matmul = f16_matmul;
    table->products.int8_add_rows = int8_add_rows;
    table->vectors.quantize = quantize;
    table->vectors.rms_norm = rms_norm;
    table->vectors.layer_norm = layer_norm;
    table->vectors.max = max_of;
    table->vectors.exp_sum = exp_sum;
    table->vectors.silu_gate = silu_gate;
    table->vectors.relu2_gate = relu2_gate;
    table->vectors.gelu_gate = gelu_gate;
    table->vectors.relu_gate = relu_gate;
    table->vectors.gelu_erf_gate = gelu_erf_gate;
    table->bytes.f32_to_f16 = f32_to_f16;
    table->bytes.f16_to_f32 = f16_to_f32;
}

#endif
