/* SPDX-License-Identifier: MIT
 *
 * training_loops.h: the kernels of training.h in plain C, which each tier compiles for its
 * instructions; inner loops are written such that compilers vectorize them. BN_TRAINING_KERNELS is
 * their table.
 */
#ifndef BITNET_TRAINING_LOOPS_H
#define BITNET_TRAINING_LOOPS_H

#include "training.h"
#include "training_rows.h"

/* --- quantization --- */

static void codes(const void *args, size_t first, size_t end) {
    const bn_train_codes a = *(const bn_train_codes *)args;
    for (size_t row = first; row < end; row++) {
        const float *x = a.x + row * a.n, s = 127 / magnitude_of(x, a.n);
        int8_t *q = a.q + row * a.n;
        a.s[row] = s;
        for (size_t i = 0; i < a.n; i++)
            q[i] = (int8_t)(uint8_t)bits_of(x[i] * s + TO_INTEGER);
    }
}

static void between(const void *args, size_t first, size_t end) {
    const bn_train_between a = *(const bn_train_between *)args;
    const float amount = *a.amount;
    for (size_t row = first; row < end; row++) {
        const float *x = a.x + row * a.n, s = 127 / magnitude_of(x, a.n);
        float *y = a.y + row * a.n;
        for (size_t i = 0; i < a.n; i++) {
            const float q = x[i] * s + TO_INTEGER - TO_INTEGER, to = q / s;
            y[i] = x[i] + amount * (to - x[i]); /* exact at 1: to is 0, or x/2 to 2x */
        }
    }
}

static void magnitudes(const void *args, size_t first, size_t end) {
    const bn_train_magnitudes a = *(const bn_train_magnitudes *)args;
    for (size_t row = first; row < end; row++) {
        const float *w = a.w + row * a.n;
        double lane[BN_LANES] = {0}, sum = 0;
        size_t i = 0;
        for (; i + BN_LANES <= a.n; i += BN_LANES)
            for (size_t j = 0; j < BN_LANES; j++)
                lane[j] += (double)rintf(fabsf(w[i + j]) * 0x1p32f);
        for (; i < a.n; i++)
            sum += (double)rintf(fabsf(w[i]) * 0x1p32f);
        for (size_t j = 0; j < BN_LANES; j++)
            sum += lane[j];
        a.sums[row] = sum;
    }
}

static void ternary(const void *args, size_t first, size_t end) {
    const bn_train_ternary a = *(const bn_train_ternary *)args;
    for (size_t row = first; row < end; row++) {
        const float *w = a.w + row * a.n, gamma = a.gamma[a.gamma_each ? row : 0];
        int8_t *c = a.c + row * a.n;
        for (size_t i = 0; i < a.n; i++) {
            const float ratio = w[i] / gamma; /* 0.5 is rounded to even, 0 */
            c[i] = (int8_t)((ratio > 0.5f) - (ratio < -0.5f));
        }
    }
}

static void values(const void *args, size_t first, size_t end) {
    const bn_train_values a = *(const bn_train_values *)args;
    for (size_t row = first; row < end; row++) {
        const int8_t *q = a.q + row * a.n;
        const float s = a.s[row];
        if (a.y.bf16)
            for (size_t i = 0; i < a.n; i++)
                a.y.bf16[row * a.n + i] = to_bf16((float)q[i] / s);
        else
            for (size_t i = 0; i < a.n; i++)
                a.y.f32[row * a.n + i] = (float)q[i] / s;
    }
}

static void scaled(const void *args, size_t first, size_t end) {
    const bn_train_scaled a = *(const bn_train_scaled *)args;
    for (size_t row = first; row < end; row++) {
        float *y = a.y + row * a.n;
        const float s = a.s[row], factor = *a.scale / s;
        if (a.scale_each)
            for (size_t i = 0; i < a.n; i++)
                y[i] = (float)(int32_t)bits_of(y[i]) * (a.scale[i] / s);
        else
            for (size_t i = 0; i < a.n; i++)
                y[i] = (float)(int32_t)bits_of(y[i]) * factor;
    }
}

/* --- between linear layers --- */

static void norm(const void *args, size_t first, size_t end) {
    const bn_train_norm a = *(const bn_train_norm *)args;
    for (size_t row = first; row < end; row++) {
        const float *x = a.x + row * a.n;
        const float r = 1 / sqrtf(squares_of(x, a.n) / (float)a.n + a.eps);
        float *y = a.y + row * a.n;
        for (size_t i = 0; i < a.n; i++)
            y[i] = x[i] * r * a.gain[i];
    }
}

static void norm_back(const void *args, size_t first, size_t end) {
    const bn_train_norm_back a = *(const bn_train_norm_back *)args;
    for (size_t row = first; row < end; row++) {
        const float *x = a.x + row * a.n, *grad = a.grad + row * a.n;
        const float r = 1 / sqrtf(squares_of(x, a.n) / (float)a.n + a.eps);
        const float along = products_of(grad, a.gain, x, a.n) / (float)a.n * (r * r);
        float *of_x = a.of_x + row * a.n, *of_gain = a.of_gain + row / BN_TRAIN_ROWS * a.n;
        if (row % BN_TRAIN_ROWS == 0)
            memset(of_gain, 0, a.n * sizeof *of_gain);
        for (size_t i = 0; i < a.n; i++)
            of_x[i] = (grad[i] * a.gain[i] - x[i] * along) * r;
        for (size_t i = 0; i < a.n; i++)
            of_gain[i] += grad[i] * x[i] * r;
    }
}

static void gate(const void *args, size_t first, size_t end) {
    const bn_train_gate a = *(const bn_train_gate *)args;
    for (size_t i = first * a.n; i < end * a.n; i++) {
        const float x = a.gate[i], positive = x < 0 ? 0 : x;
        a.y[i] = positive * positive * a.up[i];
    }
}

static void gate_back(const void *args, size_t first, size_t end) {
    const bn_train_gate_back a = *(const bn_train_gate_back *)args;
    for (size_t i = first * a.n; i < end * a.n; i++) {
        const float x = a.gate[i], positive = x < 0 ? 0 : x, once = a.grad[i] * positive;
        a.of_gate[i] = 2 * (once * a.up[i]);
        a.of_up[i] = positive * once;
    }
}

static void rotated(const void *args, size_t first, size_t end) {
    const bn_train_rotated a = *(const bn_train_rotated *)args;
    for (size_t row = first; row < end; row++) {
        const size_t t = row % a.tokens, h = row / a.tokens % a.heads, b = row / a.tokens / a.heads;
        const float *x = a.x + b * a.x_strides[0] + h * a.x_strides[1] + t * a.x_strides[2];
        const size_t at = b * a.table_stride + t * a.half;
        const float *cosine = a.cos + at, *sine = a.sin + at, sign = a.inverse ? -1 : 1;
        float *y = a.y + row * a.n;
        for (size_t i = 0; i < a.half; i++)
            y[i] = x[i] * cosine[i] - x[i + a.half] * (sign * sine[i]);
        for (size_t i = 0; i < a.half; i++)
            y[i + a.half] = x[i + a.half] * cosine[i] + x[i] * (sign * sine[i]);
        memcpy(y + 2 * a.half, x + 2 * a.half, (a.n - 2 * a.half) * sizeof *y);
    }
}

/* --- softmax --- */

/* scale scores + bias */
INLINE void scores_of(float *x, const bn_train_softmax *a, const uint16_t *scores,
                      const float *bias, size_t n) {
    if (bias)
        for (size_t i = 0; i < n; i++)
            x[i] = bias[i] + a->scale * from_bf16(scores[i]);
    else
        for (size_t i = 0; i < n; i++)
            x[i] = a->scale * from_bf16(scores[i]);
}

static void softmax(const void *args, size_t first, size_t end) {
    const bn_train_softmax a = *(const bn_train_softmax *)args;
    float x[BN_TRAIN_KEYS];
    for (size_t row = first; row < end; row++) {
        const size_t t = row % a.tokens, b = row / a.tokens / a.heads;
        const float *bias = a.bias ? a.bias + b * a.bias_stride + t * a.n : NULL;
        const size_t seen = a.causal && !bias ? t + 1 : a.n;
        uint16_t *p = a.p + row * a.n;
        scores_of(x, &a, a.scores + row * a.n, bias, seen);
        const float sum = exponentials(x, largest_of(x, seen), seen);
        for (size_t i = 0; i < seen; i++)
            p[i] = to_bf16(x[i] / sum);
        memset(p + seen, 0, (a.n - seen) * sizeof *p);
    }
}

enum { AT_ONCE = 1024 };

/* y[at] and the next n - 1 */
INLINE void store(bn_floating y, size_t at, const float *x, size_t n) {
    if (y.bf16)
        for (size_t i = 0; i < n; i++)
            y.bf16[at + i] = to_bf16(x[i]);
    else
        memcpy(y.f32 + at, x, n * sizeof *x);
}

/* One row, whose gradient starts at of_z[at]. */
INLINE float entropy_of(bn_floating of_z, size_t at, const float *z, size_t target, size_t n) {
    const float most = largest_of(z, n);
    float sum = 0, part[AT_ONCE];
    for (size_t i = 0; i < n; i += AT_ONCE) {
        const size_t some = n - i < AT_ONCE ? n - i : AT_ONCE;
        memcpy(part, z + i, some * sizeof *z);
        sum += exponentials(part, most, some);
    }
    const float share = 1 / sum;
    for (size_t i = 0; i < n; i += AT_ONCE) {
        const size_t some = n - i < AT_ONCE ? n - i : AT_ONCE;
        for (size_t j = 0; j < some; j++)
            part[j] = exp_of(z[i + j] - most) * share;
        if (target - i < some) /* both unsigned: not if target < i */
            part[target - i] -= 1;
        store(of_z, at + i, part, some);
    }
    return most - z[target] + logf(sum);
}

static void entropy(const void *args, size_t first, size_t end) {
    const bn_train_entropy a = *(const bn_train_entropy *)args;
    static const float nothing[AT_ONCE];
    for (size_t row = first; row < end; row++) {
        const size_t at = row * a.n;
        a.loss[row] = 0;
        if (a.targets[row] >= 0)
            a.loss[row] = entropy_of(a.of_z, at, a.z + at, (size_t)a.targets[row], a.n);
        else
            for (size_t i = 0; i < a.n; i += AT_ONCE)
                store(a.of_z, at + i, nothing, a.n - i < AT_ONCE ? a.n - i : AT_ONCE);
    }
}

#define BN_TRAINING_KERNELS                                                                        \
    {                                                                                              \
        .codes = codes, .between = between, .magnitudes = magnitudes, .ternary = ternary,          \
        .values = values, .scaled = scaled, .norm = norm, .norm_back = norm_back, .gate = gate,    \
        .gate_back = gate_back, .rotated = rotated, .softmax = softmax, .entropy = entropy         \
    }

#endif
