/* SPDX-License-Identifier: MIT
 *
 * check_vectors.h: kernels on vectors of floats.
 */
#ifndef BITNET_TESTS_CHECK_VECTORS_H
#define BITNET_TESTS_CHECK_VECTORS_H

#include "test.h"

static void check_scale_sums(test *t) {
    const int kind = (int)below(t, FLOAT_KINDS), each = (int)below(t, 2);
    const int in_place = below(t, 3) == 0; /* the tier's y is its acc */
    const size_t n = size_to(t, 300), tokens = size_to(t, 5);
    bn_scaling a = {.y_stride = n + (in_place ? 0 : below(t, 9)),
                    .acc = integers(t, tokens * n, 1 << 30),
                    .acc_stride = n,
                    .q_sums = below(t, 2) ? integers(t, tokens, 1 << 24) : NULL,
                    .s = floats(t, tokens, kind),
                    .scales = floats(t, each ? n : 1, kind),
                    .scale_each = each,
                    .accumulate = !in_place && below(t, 2),
                    .bias = below(t, 2) ? floats(t, n, kind) : NULL,
                    .weight = random_float(t, kind),
                    .n = n,
                    .tokens = tokens};
    const size_t all = (tokens - 1) * a.y_stride + n;
    const void *before = in_place ? (const void *)a.acc : floats(t, all, kind);
    float *y[2];
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, all * sizeof(float));
        memcpy(y[i], before, all * sizeof(float));
    }
    a.y = y[1];
    t->scalar->vectors.scale_sums(&a);
    a.y = y[0];
    a.acc = in_place ? (const int32_t *)(const void *)y[0] : a.acc;
    t->tier->vectors.scale_sums(&a);
    same_floats(t, y[0], y[1], all, "scale_sums"); /* including the gaps between tokens */
    done(t, "scale_sums");
}

static void call_scale_sums(bench *b) {
    b->k->vectors.scale_sums(&(bn_scaling){.y = b->y,
                                           .acc = b->acc,
                                           .scales = b->x,
                                           .s = b->x,
                                           .bias = b->x,
                                           .accumulate = 1,
                                           .weight = 1,
                                           .n = b->cols,
                                           .tokens = 1});
}

static void time_scale_sums(bench *b) {
    time_vector(b, "scale_sums", call_scale_sums, 12);
}

static void check_add(test *t) {
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n = size_to(t, 300);
    const float *before = floats(t, n, kind), *x = floats(t, n, kind);
    const float weight = random_float(t, kind);
    float *y[2];
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, n * sizeof(float));
        memcpy(y[i], before, n * sizeof(float));
        (i ? t->scalar : t->tier)->vectors.add(y[i], x, weight, n);
    }
    same_floats(t, y[0], y[1], n, "add");
    done(t, "add");
}

static void call_add(bench *b) {
    b->k->vectors.add(b->y, b->x, 0, b->cols);
}

static void time_add(bench *b) {
    time_vector(b, "add", call_add, 8);
}

static void check_quantize(test *t) {
    const size_t n = size_to(t, 700), rows = size_to(t, 9), x_stride = n + below(t, 3);
    const size_t padded = bn_q_row(n), q_stride = padded + below(t, 2) * BN_Q_ALIGN;
    float *x = floats(t, rows * x_stride, (int)below(t, FLOAT_KINDS));
    if (below(t, 4) == 0) { /* exact halves: max 127, so that s is 1 */
        for (size_t i = 0; i < rows * x_stride; i++)
            x[i] = (float)((int)below(t, 507) - 253) * 0.5f;
        for (size_t r = 0; r < rows; r++)
            x[r * x_stride + below(t, n)] = -127;
    }
    bn_quantizing a[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_quantizing){.q = buffer(t, (rows - 1) * q_stride + padded),
                               .s = buffer(t, rows * sizeof(float)),
                               .sums = buffer(t, rows * sizeof(int32_t)),
                               .x = x,
                               .q_stride = q_stride,
                               .x_stride = x_stride,
                               .n = n,
                               .rows = rows};
        (i ? t->scalar : t->tier)->vectors.quantize(&a[i]);
    }
    same_floats(t, a[0].s, a[1].s, rows, "scale of quantize");
    for (size_t r = 0; r < rows; r++) {
        float worst = 0;
        for (const float *at = x + r * x_stride; at < x + r * x_stride + n; at++)
            worst = isnan(worst) || isnan(*at) ? NAN : fmaxf(worst, fabsf(*at));
        CHECK(isnan(a->s[r]) == isnan(worst) && (a->s[r] == 0) == isinf(worst));
        if (isnan(a->s[r]))
            continue;
        same_bytes(t, a[0].q + r * q_stride, a[1].q + r * q_stride, padded, "quantize");
        CHECK_EQ(a[0].sums[r], a[1].sums[r]);
    }
    done(t, "quantize");
}

static void call_quantize(bench *b) {
    float s;
    b->k->vectors.quantize(
        &(bn_quantizing){.q = b->q, .s = &s, .sums = b->acc, .x = b->x, .n = b->cols, .rows = 1});
}

static void time_quantize(bench *b) {
    time_vector(b, "quantize", call_quantize, 4);
}

static void check_norm(test *t, bn_normalize *tier, bn_normalize *scalar, const char *what) {
    const int kind = (int)below(t, FLOAT_KINDS), in_place = (int)below(t, 2);
    const size_t n = size_to(t, 700), rows = size_to(t, 9), x_stride = n + below(t, 3);
    const size_t y_stride = in_place ? x_stride : n + below(t, 3);
    const float *x = floats(t, rows * x_stride, kind);
    bn_norming a = {.y_stride = y_stride,
                    .x_stride = x_stride,
                    .gain = floats(t, n, kind),
                    .bias = below(t, 2) ? floats(t, n, kind) : NULL,
                    .n = n,
                    .rows = rows,
                    .eps = 1e-5f};
    float *y[2];
    int finite[2];
    for (int i = 0; i < 2; i++) {
        a.y = y[i] = buffer(t, rows * y_stride * sizeof(float));
        memcpy(y[i], x, in_place ? rows * x_stride * sizeof *x : 0);
        a.x = in_place ? y[i] : x;
        finite[i] = (i ? scalar : tier)(&a);
    }
    CHECK_EQ(finite[0], finite[1]);
    for (size_t row = 0; row < rows; row++) {
        same_floats(t, y[0] + row * y_stride, y[1] + row * y_stride, n, what);
        for (size_t i = 0; i < n; i++)
            CHECK_MSG(isfinite(x[row * x_stride + i]) || !finite[0], "%s does not show %g", what,
                      (double)x[row * x_stride + i]);
    }
    done(t, what);
}

static void call_norm(bench *b, bn_normalize *normalize, const float *bias) {
    normalize(&(bn_norming){.y = b->y,
                            .x = b->x,
                            .y_stride = b->cols,
                            .x_stride = b->cols,
                            .gain = b->x,
                            .bias = bias,
                            .n = b->cols,
                            .rows = b->tokens,
                            .eps = 1e-5f});
}

/* One row, and several. */
static void time_norm(bench *b, const char *name, void (*call)(bench *), double bytes) {
    time_vector(b, name, call, bytes);
    b->tokens = 8, b->cols = 768;
    bench_line(b, name, call, (double)(b->tokens * b->cols), bytes * (double)(b->tokens * b->cols));
}

static void check_rms_norm(test *t) {
    check_norm(t, t->tier->vectors.rms_norm, t->scalar->vectors.rms_norm, "rms_norm");
}

static void call_rms_norm(bench *b) {
    call_norm(b, b->k->vectors.rms_norm, NULL);
}

static void time_rms_norm(bench *b) {
    time_norm(b, "rms_norm", call_rms_norm, 8);
}

static void check_layer_norm(test *t) {
    check_norm(t, t->tier->vectors.layer_norm, t->scalar->vectors.layer_norm, "layer_norm");
}

static void call_layer_norm(bench *b) {
    call_norm(b, b->k->vectors.layer_norm, b->x + b->cols);
}

static void time_layer_norm(bench *b) {
    time_norm(b, "layer_norm", call_layer_norm, 12);
}

static void check_exp_sum(test *t) {
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n = size_to(t, 700);
    const float *x = floats(t, n, kind), shift = random_float(t, kind);
    float *y[2], sum[2];
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, n * sizeof(float));
        memcpy(y[i], x, n * sizeof(float));
        sum[i] = (i ? t->scalar : t->tier)->vectors.exp_sum(y[i], n, shift);
    }
    same_floats(t, y[0], y[1], n, "exp_sum");
    same_floats(t, &sum[0], &sum[1], 1, "sum of exp_sum");
    done(t, "exp_sum");
}

static void call_exp_sum(bench *b) {
    b->k->vectors.exp_sum(b->y, b->cols, 0.5f);
}

static void time_exp_sum(bench *b) {
    time_vector(b, "exp_sum", call_exp_sum, 4);
}

static void check_gate(test *t, bn_gate *tier, bn_gate *scalar, const char *what) {
    const int kind = (int)below(t, FLOAT_KINDS), in_place = (int)below(t, 2);
    const size_t n = size_to(t, 300);
    const float *g = floats(t, n, kind), *u = floats(t, n, kind);
    float *h[2];
    for (int i = 0; i < 2; i++) {
        h[i] = buffer(t, n * sizeof(float));
        memcpy(h[i], g, n * sizeof(float));
        (i ? scalar : tier)(h[i], in_place ? h[i] : g, u, n);
    }
    same_floats(t, h[0], h[1], n, what);
    done(t, what);
}

static void check_silu_gate(test *t) {
    check_gate(t, t->tier->vectors.silu_gate, t->scalar->vectors.silu_gate, "silu_gate");
}

static void call_silu_gate(bench *b) {
    b->k->vectors.silu_gate(b->y, b->x, b->x + b->cols, b->cols);
}

static void time_silu_gate(bench *b) {
    time_vector(b, "silu_gate", call_silu_gate, 8);
}

static void check_relu2_gate(test *t) {
    check_gate(t, t->tier->vectors.relu2_gate, t->scalar->vectors.relu2_gate, "relu2_gate");
}

static void call_relu2_gate(bench *b) {
    b->k->vectors.relu2_gate(b->y, b->x, b->x + b->cols, b->cols);
}

static void time_relu2_gate(bench *b) {
    time_vector(b, "relu2_gate", call_relu2_gate, 8);
}

static void check_gelu_gate(test *t) {
    check_gate(t, t->tier->vectors.gelu_gate, t->scalar->vectors.gelu_gate, "gelu_gate");
}

static void call_gelu_gate(bench *b) {
    b->k->vectors.gelu_gate(b->y, b->x, b->x + b->cols, b->cols);
}

static void time_gelu_gate(bench *b) {
    time_vector(b, "gelu_gate", call_gelu_gate, 8);
}

static void check_relu_gate(test *t) {
    check_gate(t, t->tier->vectors.relu_gate, t->scalar->vectors.relu_gate, "relu_gate");
}

static void call_relu_gate(bench *b) {
    b->k->vectors.relu_gate(b->y, b->x, b->x + b->cols, b->cols);
}

static void time_relu_gate(bench *b) {
    time_vector(b, "relu_gate", call_relu_gate, 8);
}

static void check_gelu_erf_gate(test *t) {
    check_gate(t, t->tier->vectors.gelu_erf_gate, t->scalar->vectors.gelu_erf_gate,
               "gelu_erf_gate");
}

static void call_gelu_erf_gate(bench *b) {
    b->k->vectors.gelu_erf_gate(b->y, b->x, b->x + b->cols, b->cols);
}

static void time_gelu_erf_gate(bench *b) {
    time_vector(b, "gelu_erf_gate", call_gelu_erf_gate, 8);
}

#endif
