/* SPDX-License-Identifier: MIT
 *
 * training_loops.h: the kernels of training.h in plain C, which each tier compiles for its
 * instructions; inner loops are written such that compilers vectorize them. BN_TRAINING_KERNELS is
 * their table.
 */
#ifndef BITNET_TRAINING_LOOPS_H
#define BITNET_TRAINING_LOOPS_H

#include "products.h"
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

/* Exact where amount is 1: q / s is then 0, or x/2 to 2x. */
INLINE float partly(float x, float s, float amount) {
    const float q = x * s + TO_INTEGER - TO_INTEGER;
    return x + amount * (q / s - x);
}

static void between(const void *args, size_t first, size_t end) {
    const bn_train_between a = *(const bn_train_between *)args;
    const float amount = *a.amount;
    for (size_t row = first; row < end; row++) {
        const float *x = a.x + row * a.n, s = 127 / magnitude_of(x, a.n);
        if (a.y.bf16)
            for (size_t i = 0; i < a.n; i++)
                a.y.bf16[row * a.n + i] = to_bf16(partly(x[i], s, amount));
        else
            for (size_t i = 0; i < a.n; i++)
                a.y.f32[row * a.n + i] = partly(x[i], s, amount);
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

/* The codes of a row in a tile, four in each byte; bytes do not overflow into each other. */
INLINE uint32_t packed(const int8_t *codes) {
    uint8_t stored[BN_TERNARY_TILE_K];
    uint32_t fields[4];
    for (size_t i = 0; i < BN_TERNARY_TILE_K; i++)
        stored[i] = (uint8_t)(codes[i] + 1);
    memcpy(fields, stored, sizeof fields);
    return fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6;
}

static void tiles(const void *args, size_t first, size_t end) {
    const bn_train_tiles a = *(const bn_train_tiles *)args;
    const size_t whole = a.n / BN_TERNARY_TILE_K, left = a.n % BN_TERNARY_TILE_K;
    const size_t across = bn_round_up(a.n, BN_TRAIN_COLUMNS) / BN_TERNARY_TILE_K;
    for (size_t row = first; row < end; row++) {
        const int8_t *c = a.c + row * a.n;
        uint8_t *to = a.tiles + row / BN_PANEL * across * BN_TILE_BYTES + row % BN_PANEL * 4;
        for (size_t i = 0; i < across; i++, to += BN_TILE_BYTES) {
            int8_t end_of_row[BN_TERNARY_TILE_K] = {0};
            if (i == whole)
                memcpy(end_of_row, c + i * BN_TERNARY_TILE_K, left);
            const uint32_t codes = packed(i < whole ? c + i * BN_TERNARY_TILE_K : end_of_row);
            memcpy(to, &codes, sizeof codes);
        }
    }
}

_Static_assert((int)BN_TRAIN_OUTPUTS == BN_PANEL, "rows of a panel");

/* Panels that are multiplied at once: their sums are on the stack. */
enum { TRAIN_PANELS = 8 };

static void linear_block(const bn_train_linear *a, size_t row, size_t rows) {
    _Alignas(64) int32_t acc[BN_TRAIN_ROWS * TRAIN_PANELS * BN_PANEL];
    int32_t q_sums[BN_TRAIN_ROWS];
    const size_t k_tiles = a->columns / BN_TERNARY_TILE_K, panels = a->n / BN_PANEL;
    for (size_t t = 0; t < rows; t++) {
        int32_t sum = 0;
        for (size_t k = 0; k < a->columns; k++)
            sum += a->q[(row + t) * a->columns + k];
        q_sums[t] = sum;
    }
    for (size_t p = 0; p < panels; p += TRAIN_PANELS) {
        const bn_matmul m = {.acc = acc,
                             .acc_stride = TRAIN_PANELS * BN_PANEL,
                             .tiles = a->tiles + p * k_tiles * BN_TILE_BYTES,
                             .panel_stride = k_tiles * BN_TILE_BYTES,
                             .panels = bn_min(panels - p, TRAIN_PANELS),
                             .k_tiles = k_tiles,
                             .q = a->q + row * a->columns,
                             .q_stride = a->columns,
                             .tokens = rows};
        const bn_scaling to = {.y = a->y + row * a->n + p * BN_PANEL,
                               .y_stride = a->n,
                               .acc = acc,
                               .acc_stride = m.acc_stride,
                               .q_sums = q_sums,
                               .s = a->s + row,
                               .scales = a->scale + (a->scale_each ? p * BN_PANEL : 0),
                               .scale_each = a->scale_each,
                               .n = m.panels * BN_PANEL,
                               .tokens = rows};
        a->product(&m, &to);
    }
}

static void linear(const void *args, size_t first, size_t end) {
    for (size_t row = first; row < end; row += BN_TRAIN_ROWS)
        linear_block(args, row, bn_min(end - row, BN_TRAIN_ROWS));
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
        const size_t some = bn_min(n - i, AT_ONCE);
        memcpy(part, z + i, some * sizeof *z);
        sum += exponentials(part, most, some);
    }
    const float share = 1 / sum;
    for (size_t i = 0; i < n; i += AT_ONCE) {
        const size_t some = bn_min(n - i, AT_ONCE);
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
                store(a.of_z, at + i, nothing, bn_min(a.n - i, AT_ONCE));
    }
}

#define BN_TRAINING_KERNELS                                                                        \
    {                                                                                              \
        .codes = codes, .between = between, .magnitudes = magnitudes, .ternary = ternary,          \
        .values = values, .tiles = tiles, .linear = linear, .scaled = scaled, .norm = norm,        \
        .norm_back = norm_back, .gate = gate, .gate_back = gate_back, .rotated = rotated,          \
        .softmax = softmax, .entropy = entropy                                                     \
    }

#endif
