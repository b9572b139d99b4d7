/* SPDX-License-Identifier: MIT
 *
 * kernels_neon_float.c: every kernel on floats, for all ARM tiers.
 */
#include "../kernels.h"

#if defined(__aarch64__)

#include <math.h>

#include "lanes.h"

/* --- products --- */

/* y[r] of `rows` (a constant) rows and one token; 4 rows share a load of x and hide the latency. */
INLINE void dot_rows(float *y, const void *w, size_t first, size_t cols, const float *x, int half,
                     const size_t rows) {
    lanes sum[4];
    UNROLL
    for (size_t r = 0; r < rows; r++)
        sum[r] = zero();
    for (size_t k = 0; k < cols; k += BN_LANES) {
        const lanes xk = load(x + k, cols - k);
        UNROLL
        for (size_t r = 0; r < rows; r++)
            sum[r] = fma_lanes(sum[r], load_as(w, first + r * cols + k, cols - k, half), xk);
    }
    UNROLL
    for (size_t r = 0; r < rows; r++)
        y[r] = tree(sum[r]);
}

INLINE void matmul(float *y, size_t y_stride, const void *w, size_t rows, size_t cols,
                   const float *x, size_t x_stride, size_t tokens, int half) {
    size_t r = 0;
    for (; r + 4 <= rows; r += 4)
        for (size_t t = 0; t < tokens; t++)
            dot_rows(y + t * y_stride + r, w, r * cols, cols, x + t * x_stride, half, 4);
    for (; r < rows; r++)
        for (size_t t = 0; t < tokens; t++)
            dot_rows(y + t * y_stride + r, w, r * cols, cols, x + t * x_stride, half, 1);
}

static void f32_matmul(float *y, size_t y_stride, const float *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens) {
    matmul(y, y_stride, w, rows, cols, x, x_stride, tokens, 0);
}

static void f16_matmul(float *y, size_t y_stride, const uint16_t *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens) {
    matmul(y, y_stride, w, rows, cols, x, x_stride, tokens, 1);
}

/* --- norms, activations --- */

static float quantize(int8_t *q, int32_t *sum, const float *x, size_t n, size_t padded) {
    float32x4_t most = vdupq_n_f32(1e-5f);
    for (size_t i = 0; i < n; i += BN_LANES) {
        const lanes v = load(x + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++) { /* a comparison, because it is false for NaN */
            const float32x4_t a = vabsq_f32(v.val[j]);
            most = vbslq_f32(vcgtq_f32(a, most), a, most);
        }
    }
    const float s = 127.0f / vmaxvq_f32(most);
    int32x4_t total = vdupq_n_s32(0);
    for (size_t i = 0; i < n; i += BN_LANES) {
        const lanes v = load(x + i, n - i);
        int32x4_t r[4];
        UNROLL
        for (int j = 0; j < 4; j++) { /* maxnm takes the number when the other is NaN */
            const float32x4_t low = vmaxnmq_f32(vmulq_n_f32(v.val[j], s), vdupq_n_f32(-127));
            r[j] = vcvtnq_s32_f32(vminq_f32(low, vdupq_n_f32(127)));
            total = vaddq_s32(total, r[j]);
        }
        const int16x8_t a = vcombine_s16(vmovn_s32(r[0]), vmovn_s32(r[1]));
        const int16x8_t b = vcombine_s16(vmovn_s32(r[2]), vmovn_s32(r[3]));
        vst1q_s8(q + i, vcombine_s8(vmovn_s16(a), vmovn_s16(b))); /* padded is a multiple of 64 */
    }
    memset(q + n, 0, padded - n);
    *sum = vaddvq_s32(total);
    return s;
}

static float rms_norm(float *y, const float *x, const float *gain, size_t n, float eps) {
    lanes sums = zero();
    for (size_t i = 0; i < n; i += BN_LANES) {
        const lanes v = load(x + i, n - i);
        sums = fma_lanes(sums, v, v);
    }
    const float sum = tree(sums);
    const float r = 1.0f / sqrtf(sum / (float)n + eps);
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(x + i, n - i);
        const lanes g = load(gain + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++)
            v.val[j] = vmulq_f32(vmulq_n_f32(v.val[j], r), g.val[j]);
        store(y + i, v, n - i);
    }
    return sum;
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
    x = vminq_f32(vmaxnmq_f32(x, vdupq_n_f32(BN_EXP_LO)), vdupq_n_f32(BN_EXP_HI));
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
        UNROLL
        for (int j = 0; j < 4; j++)
            sum.val[j] = vaddq_f32(sum.val[j], v.val[j]);
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

static void relu2_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i += BN_LANES) {
        lanes v = load(g + i, n - i);
        const lanes w = load(u + i, n - i);
        UNROLL
        for (int j = 0; j < 4; j++) { /* the mask also turns NaN and -0 into 0 */
            const uint32x4_t positive = vcgtzq_f32(v.val[j]);
            const float32x4_t r =
                vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v.val[j]), positive));
            v.val[j] = vmulq_f32(vmulq_f32(r, r), w.val[j]);
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
        for (int j = 0; j < 4; j++) /* min and max hand NaN on */
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

/* --- attention --- */

/* 4 keys: lane j of the float rule is a register, so the sums stay in their lanes. */
INLINE void qk_keys(float *scores, const float *q, const uint8_t *k, size_t head_dim, int half) {
    const size_t size = half ? sizeof(uint16_t) : sizeof(float), row = BN_LANES * size;
    uint8_t last[BN_LANES * BN_LANES * sizeof(float)] __attribute__((aligned(16)));
    float32x4_t s[BN_LANES];
    UNROLL
    for (int j = 0; j < BN_LANES; j++)
        s[j] = vdupq_n_f32(0);
    for (size_t d = 0; d < head_dim; d += BN_LANES, k += BN_LANES * row) {
        const lanes x = load(q + d, head_dim - d);
        if (head_dim - d < BN_LANES) {
            memset(last, 0, sizeof last);
            for (size_t j = 0; j < head_dim - d; j++)
                memcpy(last + j * row, k + j * row, 4 * size);
            k = last;
        }
        UNROLL
        for (int j = 0; j < BN_LANES; j++) {
            const void *at = k + (size_t)j * row;
            const float32x4_t key =
                half ? vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))) : vld1q_f32(at);
            s[j] = vfmaq_n_f32(s[j], key, x.val[j / 4][j % 4]);
        }
    }
    UNROLL
    for (int j = 0; j < 8; j++)
        s[j] = vaddq_f32(s[j], s[j + 8]);
    UNROLL
    for (int j = 0; j < 4; j++)
        s[j] = vaddq_f32(s[j], s[j + 4]);
    vst1q_f32(scores, vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[1], s[3])));
}

INLINE void qk(float *scores, size_t score_stride, const float *q, size_t n_q, const void *k,
               size_t head_dim, size_t tiles, int half) {
    const size_t size = half ? sizeof(uint16_t) : sizeof(float);
    for (size_t t = 0; t < tiles; t++)
        for (size_t i = 0; i < n_q; i++)
            for (size_t j = 0; j < BN_LANES; j += 4)
                qk_keys(scores + i * score_stride + t * BN_LANES + j, q + i * head_dim,
                        (const uint8_t *)k + (t * head_dim * BN_LANES + j) * size, head_dim, half);
}

static void qk_f16(float *scores, size_t score_stride, const float *q, size_t n_q,
                   const uint16_t *k, size_t head_dim, size_t tiles) {
    enum { WIDE = 128 };
    float tile[WIDE * BN_LANES];
    if (n_q == 1 || head_dim > WIDE) {
        qk(scores, score_stride, q, n_q, k, head_dim, tiles, 1);
        return;
    }
    for (size_t t = 0; t < tiles; t++) { /* widen a tile once for all queries */
        f16_to_f32(tile, k + t * head_dim * BN_LANES, head_dim * BN_LANES);
        qk(scores + t * BN_LANES, score_stride, q, n_q, tile, head_dim, 1, 0);
    }
}

static void qk_f32(float *scores, size_t score_stride, const float *q, size_t n_q, const float *k,
                   size_t head_dim, size_t tiles) {
    qk(scores, score_stride, q, n_q, k, head_dim, tiles, 0);
}

/* 16 dimensions of `n_q` (a constant) queries stay in registers while the keys go by. */
INLINE void pv_queries(float *out, const float *p, size_t p_stride, const void *v, size_t d,
                       size_t head_dim, size_t keys, int half, const size_t n_q) {
    lanes sum[4];
    UNROLL
    for (size_t i = 0; i < n_q; i++)
        sum[i] = load(out + i * head_dim + d, head_dim - d);
    for (size_t t = 0; t < keys; t++) {
        const lanes value = load_as(v, t * head_dim + d, head_dim - d, half);
        UNROLL
        for (size_t i = 0; i < n_q; i++) {
            const float32x4_t weight = vdupq_n_f32(p[i * p_stride + t]);
            sum[i] = fma_lanes(sum[i], (lanes){{weight, weight, weight, weight}}, value);
        }
    }
    UNROLL
    for (size_t i = 0; i < n_q; i++)
        store(out + i * head_dim + d, sum[i], head_dim - d);
}

INLINE void pv(float *out, const float *p, size_t p_stride, size_t n_q, const void *v,
               size_t head_dim, size_t keys, int half) {
    size_t i = 0;
    for (; i + 4 <= n_q; i += 4)
        for (size_t d = 0; d < head_dim; d += BN_LANES)
            pv_queries(out + i * head_dim, p + i * p_stride, p_stride, v, d, head_dim, keys, half,
                       4);
    for (; i < n_q; i++)
        for (size_t d = 0; d < head_dim; d += BN_LANES)
            pv_queries(out + i * head_dim, p + i * p_stride, p_stride, v, d, head_dim, keys, half,
                       1);
}

static void pv_f16(float *out, const float *p, size_t p_stride, size_t n_q, const uint16_t *v,
                   size_t head_dim, size_t keys) {
    pv(out, p, p_stride, n_q, v, head_dim, keys, 1);
}

static void pv_f32(float *out, const float *p, size_t p_stride, size_t n_q, const float *v,
                   size_t head_dim, size_t keys) {
    pv(out, p, p_stride, n_q, v, head_dim, keys, 0);
}

void bn_kernels_neon_float(bn_kernels *table) {
    table->f32_matmul = f32_matmul;
    table->f16_matmul = f16_matmul;
    table->quantize = quantize;
    table->rms_norm = rms_norm;
    table->max = max_of;
    table->exp_sum = exp_sum;
    table->silu_gate = silu_gate;
    table->relu2_gate = relu2_gate;
    table->qk_f16 = qk_f16;
    table->qk_f32 = qk_f32;
    table->pv_f16 = pv_f16;
    table->pv_f32 = pv_f32;
    table->f32_to_f16 = f32_to_f16;
    table->f16_to_f32 = f16_to_f32;
}

#endif
