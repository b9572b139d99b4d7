/* SPDX-License-Identifier: MIT
 *
 * kernels_float.h: checks of everything that computes with floats.
 */
#include "kernels_test.h"

static void check_rows(test *t, int f16) {
    const char *what = f16 ? "f16_matmul" : "f32_matmul";
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t rows = below(t, 20), cols = size_to(t, 200), tokens = size_to(t, 9);
    const size_t x_stride = cols + below(t, 5), y_stride = rows + below(t, 5);
    const size_t n_y = (tokens - 1) * y_stride + rows;
    const float *x = floats(t, (tokens - 1) * x_stride + cols, kind);
    const void *w = f16 ? (const void *)halves(t, rows * cols, kind) : floats(t, rows * cols, kind);
    float *y[2];
    for (int i = 0; i < 2; i++) {
        const bn_kernels *k = i ? t->scalar : t->tier;
        y[i] = buffer(t, n_y * sizeof(float));
        if (f16)
            k->f16_matmul(y[i], y_stride, w, rows, cols, x, x_stride, tokens);
        else
            k->f32_matmul(y[i], y_stride, w, rows, cols, x, x_stride, tokens);
    }
    same_floats(t, y[0], y[1], n_y, what);
    done(t, what);
}

static void check_f32_matmul(test *t) {
    check_rows(t, 0);
}

static void check_f16_matmul(test *t) {
    check_rows(t, 1);
}

static void check_quantize(test *t) {
    const size_t n = size_to(t, 700);
    const size_t padded = ((n + BN_Q_ALIGN - 1) / BN_Q_ALIGN + below(t, 2)) * BN_Q_ALIGN;
    float *x = floats(t, n, (int)below(t, FLOAT_KINDS));
    if (below(t, 4) == 0) { /* exact halves: max 127, so that s is 1 */
        for (size_t i = 0; i < n; i++)
            x[i] = (float)((int)below(t, 507) - 253) * 0.5f;
        x[below(t, n)] = -127;
    }
    int8_t *q[2];
    float s[2];
    int32_t sum[2] = {-1, -1};
    for (int i = 0; i < 2; i++) {
        q[i] = buffer(t, padded);
        s[i] = (i ? t->scalar : t->tier)->quantize(q[i], &sum[i], x, n, padded);
    }
    same_floats(t, &s[0], &s[1], 1, "scale of quantize");
    float worst = 0;
    for (size_t i = 0; i < n; i++)
        worst = isnan(worst) || isnan(x[i]) ? NAN : fmaxf(worst, fabsf(x[i]));
    CHECK(isnan(s[0]) == isnan(worst) && (s[0] == 0) == isinf(worst));
    if (!isnan(s[0])) {
        same_bytes(t, q[0], q[1], padded, "quantize");
        CHECK_EQ(sum[0], sum[1]);
    }
    done(t, "quantize");
}

static void check_rms_norm(test *t) {
    const int kind = (int)below(t, FLOAT_KINDS), in_place = (int)below(t, 2);
    const size_t n = size_to(t, 700);
    const float *x = floats(t, n, kind), *gain = floats(t, n, kind);
    float *y[2], sum[2];
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, n * sizeof(float));
        memcpy(y[i], x, n * sizeof(float));
        sum[i] = (i ? t->scalar : t->tier)->rms_norm(y[i], in_place ? y[i] : x, gain, n, 1e-5f);
    }
    same_floats(t, y[0], y[1], n, "rms_norm");
    same_floats(t, &sum[0], &sum[1], 1, "sum of rms_norm");
    done(t, "rms_norm");
}

static void check_max(test *t) {
    const size_t n = size_to(t, 300);
    float *x = floats(t, n, (int)below(t, FLOAT_KINDS));
    const size_t dull = below(t, 4);
    for (size_t i = 0; i < n && dull == 0; i++)
        x[i] = NAN;
    /* adding 0: the sign of a zero maximum is not specified */
    float found = t->tier->max(x, n) + 0.0f, expected = t->scalar->max(x, n) + 0.0f;
    same_floats(t, &found, &expected, 1, "max");
    done(t, "max");
}

static void check_exp_sum(test *t) {
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n = size_to(t, 700);
    const float *x = floats(t, n, kind), shift = random_float(t, kind);
    float *y[2], sum[2];
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, n * sizeof(float));
        memcpy(y[i], x, n * sizeof(float));
        sum[i] = (i ? t->scalar : t->tier)->exp_sum(y[i], n, shift);
    }
    same_floats(t, y[0], y[1], n, "exp_sum");
    same_floats(t, &sum[0], &sum[1], 1, "sum of exp_sum");
    done(t, "exp_sum");
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
    check_gate(t, t->tier->silu_gate, t->scalar->silu_gate, "silu_gate");
}

static void check_relu2_gate(test *t) {
    check_gate(t, t->tier->relu2_gate, t->scalar->relu2_gate, "relu2_gate");
}

static void check_gelu_gate(test *t) {
    check_gate(t, t->tier->gelu_gate, t->scalar->gelu_gate, "gelu_gate");
}

static void check_relu_gate(test *t) {
    check_gate(t, t->tier->relu_gate, t->scalar->relu_gate, "relu_gate");
}

/* Keys and values in the numbers of each cache type. */
enum { F16, F32, INT8_CODES };

/* n codes, at times all at one end of their range. */
static int8_t *codes(test *t, size_t n) {
    int8_t *c = buffer(t, n);
    const int end = (int)below(t, 4);
    for (size_t i = 0; i < n; i++)
        c[i] = (int8_t)(end == 0 ? 127 : end == 1 ? -127 : (int)below(t, 255) - 127);
    return c;
}

static const void *numbers(test *t, size_t n, int type, int kind) {
    return type == F16   ? (const void *)halves(t, n, kind)
           : type == F32 ? (const void *)floats(t, n, kind)
                         : (const void *)codes(t, n);
}

static void check_qk(test *t, int type, const char *what) {
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n_q = size_to(t, 9), tiles = size_to(t, 5);
    const size_t head_dim = size_to(t, type == INT8_CODES && below(t, 16) == 0 ? 1024 : 160);
    const size_t stride = tiles * BN_LANES + below(t, 20),
                 n_s = (n_q - 1) * stride + tiles * BN_LANES;
    const size_t q_row = type == INT8_CODES ? bn_q_row(head_dim) : head_dim;
    const size_t k_row = type == INT8_CODES ? (head_dim + 3) / 4 * 4 : head_dim;
    const void *q = numbers(t, n_q * q_row, type == INT8_CODES ? type : F32, kind);
    const void *k = numbers(t, tiles * k_row * BN_LANES, type, kind);
    const float *q_scale = floats(t, n_q, kind), *k_scale = floats(t, tiles * BN_LANES, kind);
    for (size_t i = 0; i < n_q && type == INT8_CODES; i++)
        memset((int8_t *)(uintptr_t)q + i * q_row + head_dim, 0, q_row - head_dim);
    float *s[2];
    for (int i = 0; i < 2; i++) {
        const bn_kernels *kernels = i ? t->scalar : t->tier;
        s[i] = buffer(t, n_s * sizeof(float));
        if (type == F16)
            kernels->qk_f16(s[i], stride, q, n_q, k, head_dim, tiles);
        else if (type == F32)
            kernels->qk_f32(s[i], stride, q, n_q, k, head_dim, tiles);
        else
            kernels->qk_int8(s[i], stride, q, q_scale, n_q, k, k_scale, head_dim, tiles);
    }
    same_floats(t, s[0], s[1], n_s, what);
    done(t, what);
}

static void check_qk_f16(test *t) {
    check_qk(t, F16, "qk_f16");
}

static void check_qk_f32(test *t) {
    check_qk(t, F32, "qk_f32");
}

static void check_qk_int8(test *t) {
    check_qk(t, INT8_CODES, "qk_int8");
}

static void check_pv(test *t, int type, const char *what) {
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n_q = size_to(t, 9), head_dim = size_to(t, 160), keys = size_to(t, 40);
    const size_t stride = keys + below(t, 5), n_out = n_q * head_dim;
    const float *p = floats(t, (n_q - 1) * stride + keys, kind), *start = floats(t, n_out, kind);
    const void *v = numbers(t, keys * head_dim, type, kind);
    float *out[2];
    for (int i = 0; i < 2; i++) {
        const bn_kernels *k = i ? t->scalar : t->tier;
        out[i] = buffer(t, n_out * sizeof(float));
        memcpy(out[i], start, n_out * sizeof(float));
        if (type == F16)
            k->pv_f16(out[i], p, stride, n_q, v, head_dim, keys);
        else if (type == F32)
            k->pv_f32(out[i], p, stride, n_q, v, head_dim, keys);
        else
            k->pv_int8(out[i], p, stride, n_q, v, head_dim, keys);
    }
    same_floats(t, out[0], out[1], n_out, what);
    done(t, what);
}

static void check_pv_f16(test *t) {
    check_pv(t, F16, "pv_f16");
}

static void check_pv_f32(test *t) {
    check_pv(t, F32, "pv_f32");
}

static void check_pv_int8(test *t) {
    check_pv(t, INT8_CODES, "pv_int8");
}

static void check_f32_to_f16(test *t) {
    const size_t n = size_to(t, 300);
    const float *x = floats(t, n, (int)below(t, FLOAT_KINDS));
    uint16_t *y[2];
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, n * sizeof(uint16_t));
        (i ? t->scalar : t->tier)->f32_to_f16(y[i], x, n);
    }
    same_bytes(t, y[0], y[1], n * sizeof(uint16_t), "f32_to_f16");
    done(t, "f32_to_f16");
}

static void check_f16_to_f32(test *t) {
    const size_t n = size_to(t, 3000), first = below(t, 65536);
    uint16_t *x = buffer(t, n * sizeof(uint16_t));
    float *y[2];
    for (size_t i = 0; i < n; i++)
        x[i] = (uint16_t)(first + i); /* all 65536 values, over the cases */
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, n * sizeof(float));
        (i ? t->scalar : t->tier)->f16_to_f32(y[i], x, n);
    }
    same_bytes(t, y[0], y[1], n * sizeof(float), "f16_to_f32");
    done(t, "f16_to_f32");
}
