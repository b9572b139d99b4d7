/* SPDX-License-Identifier: MIT
 *
 * check_training.h: operations of a training step. The tiers compile the same C, so this finds what
 * a compiler's vectors change; tests/test_kernels.py compares the results with those of torch.
 */
#ifndef BITNET_TESTS_CHECK_TRAINING_H
#define BITNET_TESTS_CHECK_TRAINING_H

#include "test.h"
#include "time_training.h"

typedef struct shape {
    size_t rows, n, all;
} shape;

static shape a_shape(test *t) {
    const size_t rows = size_to(t, 2 * BN_TRAIN_ROWS + 9), n = size_to(t, 200);
    return (shape){rows, n, rows * n};
}

static int8_t *some_codes(test *t, size_t n) {
    int8_t *q = buffer(t, n);
    for (size_t i = 0; i < n; i++)
        q[i] = (int8_t)((int)below(t, 255) - 127);
    return q;
}

/* Not 0, so that quotients are finite. */
static float *some_scales(test *t, size_t n) {
    float *s = buffer(t, n * sizeof *s);
    for (size_t i = 0; i < n; i++)
        s[i] = 1.5f + check_float(&t->random);
    return s;
}

static uint16_t *some_bf16(test *t, size_t n, int kind) {
    uint16_t *x = buffer(t, n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        const float f = random_float(t, kind);
        memcpy(&x[i], (const char *)&f + 2, sizeof x[i]); /* the upper half: little endian */
    }
    return x;
}

static void same_bf16(test *t, const uint16_t *found, const uint16_t *expected, size_t n,
                      const char *what) {
    same_bytes(t, found, expected, n * sizeof *found, what);
}

static const bn_training_kernels *of(const test *t, int scalar) {
    return &(scalar ? t->scalar : t->tier)->training;
}

static void check_train_codes(test *t) {
    const shape z = a_shape(t);
    const int kind = (int)below(t, FLOAT_KINDS);
    bn_train_codes a[2];
    const float *x = floats(t, z.all, kind);
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_codes){buffer(t, z.all), buffer(t, z.rows * sizeof(float)), x, z.n};
        of(t, i)->codes(&a[i], 0, z.rows);
    }
    same_floats(t, a[0].s, a[1].s, z.rows, "codes: s");
    if (kind <= WIDE)
        same_bytes(t, a[0].q, a[1].q, z.all, "codes: q");
    done(t, "codes");
}

static void check_train_between(test *t) {
    const shape z = a_shape(t);
    const float *x = floats(t, z.all, (int)below(t, FLOAT_KINDS)), amount = (float)below(t, 5) / 4;
    bn_train_between a[2], b[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_between){{buffer(t, z.all * sizeof(float)), NULL}, x, z.n, &amount};
        b[i] = (bn_train_between){{NULL, buffer(t, z.all * sizeof(uint16_t))}, x, z.n, &amount};
        of(t, i)->between(&a[i], 0, z.rows);
        of(t, i)->between(&b[i], 0, z.rows);
    }
    same_floats(t, a[0].y.f32, a[1].y.f32, z.all, "between");
    same_bf16(t, b[0].y.bf16, b[1].y.bf16, z.all, "between in bf16");
    done(t, "between");
}

/* Exact, so in any order. */
static void check_train_magnitudes(test *t) {
    const shape z = a_shape(t);
    const float *w = floats(t, z.all, ORDINARY);
    bn_train_magnitudes a[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_magnitudes){buffer(t, z.rows * sizeof(double)), w, z.n};
        of(t, i)->magnitudes(&a[i], 0, z.rows);
    }
    same_bytes(t, a[0].sums, a[1].sums, z.rows * sizeof(double), "magnitudes");
    done(t, "magnitudes");
}

static void check_train_ternary(test *t) {
    const shape z = a_shape(t);
    const float *w = floats(t, z.all, (int)below(t, FLOAT_KINDS)), *gamma = some_scales(t, z.rows);
    bn_train_ternary a[2];
    a[0] = (bn_train_ternary){.w = w, .gamma = gamma, .gamma_each = (int)below(t, 2), .n = z.n};
    a[1] = a[0];
    for (int i = 0; i < 2; i++) {
        a[i].c = buffer(t, z.all);
        of(t, i)->ternary(&a[i], 0, z.rows);
    }
    same_bytes(t, a[0].c, a[1].c, z.all, "ternary");
    done(t, "ternary");
}

static void check_train_values(test *t) {
    const shape z = a_shape(t);
    const int8_t *q = some_codes(t, z.all);
    const float *s = below(t, 2) ? some_scales(t, z.rows) : floats(t, z.rows, ANYTHING);
    bn_train_values a[2], b[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_values){{buffer(t, z.all * sizeof(float)), NULL}, q, s, z.n};
        b[i] = (bn_train_values){{NULL, buffer(t, z.all * sizeof(uint16_t))}, q, s, z.n};
        of(t, i)->values(&a[i], 0, z.rows);
        of(t, i)->values(&b[i], 0, z.rows);
    }
    same_floats(t, a[0].y.f32, a[1].y.f32, z.all, "values");
    same_bf16(t, b[0].y.bf16, b[1].y.bf16, z.all, "values in bf16");
    done(t, "values");
}

static int8_t *some_ternary(test *t, size_t n) {
    int8_t *c = buffer(t, n);
    for (size_t i = 0; i < n; i++)
        c[i] = (int8_t)((int)below(t, 3) - 1);
    return c;
}

static void check_train_tiles(test *t) {
    const size_t n = BN_PANEL * size_to(t, 9), k = size_to(t, 200);
    const size_t bytes = n * bn_round_up(k, BN_TRAIN_COLUMNS) / 4;
    const int8_t *c = some_ternary(t, n * k);
    bn_train_tiles a[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_tiles){buffer(t, bytes), c, k};
        of(t, i)->tiles(&a[i], 0, n);
    }
    same_bytes(t, a[0].tiles, a[1].tiles, bytes, "tiles");
    done(t, "tiles");
}

/* Some outputs are also computed from the codes. */
static void check_train_linear(test *t) {
    const size_t rows = size_to(t, BN_TRAIN_ROWS + 9), n = BN_PANEL * size_to(t, 18);
    const size_t k = size_to(t, 200), columns = bn_round_up(k, BN_TRAIN_COLUMNS);
    const int each = (int)below(t, 2);
    const int8_t *c = some_ternary(t, n * k);
    int8_t *q = some_codes(t, rows * columns);
    uint8_t *packed = buffer(t, n * columns / 4);
    const float *s = some_scales(t, rows), *scale = floats(t, n, (int)below(t, FLOAT_KINDS));
    float *y[2];
    for (size_t i = 0; i < rows; i++)
        memset(q + i * columns + k, 0, columns - k);
    of(t, 1)->tiles(&(bn_train_tiles){packed, c, k}, 0, n);
    for (int i = 0; i < 2; i++) {
        const bn_kernels *tier = i ? t->scalar : t->tier;
        const bn_train_linear a = {.product = tier->products.ternary_scaled,
                                   .y = y[i] = buffer(t, rows * n * sizeof **y),
                                   .tiles = packed,
                                   .q = q,
                                   .columns = columns,
                                   .scale = scale,
                                   .scale_each = each,
                                   .s = s,
                                   .n = n};
        tier->training.linear(&a, 0, rows);
    }
    same_floats(t, y[0], y[1], rows * n, "linear");
    for (int times = 0; times < 9; times++) {
        const size_t row = below(t, rows), i = below(t, n);
        int32_t sum = 0;
        for (size_t j = 0; j < k; j++)
            sum += c[i * k + j] * q[row * columns + j];
        float expected = (float)sum * (scale[each ? i : 0] / s[row]);
        same_floats(t, &y[0][row * n + i], &expected, 1, "linear, from the codes");
    }
    done(t, "linear");
}

static void check_train_scaled(test *t) {
    const shape z = a_shape(t);
    const int each = (int)below(t, 2);
    const int32_t *sums = integers(t, z.all, 1u << 25);
    const float *s = some_scales(t, z.rows), *scale = floats(t, z.n, (int)below(t, FLOAT_KINDS));
    bn_train_scaled a[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_scaled){buffer(t, z.all * sizeof(float)), scale, each, s, z.n};
        memcpy(a[i].y, sums, z.all * sizeof *sums);
        of(t, i)->scaled(&a[i], 0, z.rows);
    }
    same_floats(t, a[0].y, a[1].y, z.all, "scaled");
    done(t, "scaled");
}

static void check_train_norm(test *t) {
    const shape z = a_shape(t);
    const float *x = floats(t, z.all, (int)below(t, FLOAT_KINDS)), *gain = some_scales(t, z.n);
    bn_train_norm a[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_norm){buffer(t, z.all * sizeof(float)), x, gain, z.n, 1e-5f};
        of(t, i)->norm(&a[i], 0, z.rows);
    }
    same_floats(t, a[0].y, a[1].y, z.all, "norm");
    done(t, "norm");
}

static void check_train_norm_back(test *t) {
    const shape z = a_shape(t);
    const size_t blocks = (z.rows + BN_TRAIN_ROWS - 1) / BN_TRAIN_ROWS;
    const float *x = floats(t, z.all, (int)below(t, FLOAT_KINDS)), *gain = some_scales(t, z.n);
    const float *grad = floats(t, z.all, (int)below(t, FLOAT_KINDS));
    bn_train_norm_back a[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_norm_back){buffer(t, z.all * sizeof(float)),
                                    buffer(t, blocks * z.n * sizeof(float)),
                                    grad,
                                    x,
                                    gain,
                                    z.n,
                                    1e-5f};
        of(t, i)->norm_back(&a[i], 0, z.rows);
    }
    same_floats(t, a[0].of_x, a[1].of_x, z.all, "norm_back: x");
    same_floats(t, a[0].of_gain, a[1].of_gain, blocks * z.n, "norm_back: gain");
    done(t, "norm_back");
}

static void check_train_gate(test *t) {
    const shape z = a_shape(t);
    const float *g = floats(t, z.all, (int)below(t, FLOAT_KINDS));
    const float *up = floats(t, z.all, (int)below(t, FLOAT_KINDS));
    bn_train_gate a[2];
    for (int i = 0; i < 2; i++) {
        a[i] = (bn_train_gate){buffer(t, z.all * sizeof(float)), g, up, z.n};
        of(t, i)->gate(&a[i], 0, z.rows);
    }
    same_floats(t, a[0].y, a[1].y, z.all, "gate");
    done(t, "gate");
}

static void check_train_gate_back(test *t) {
    const shape z = a_shape(t);
    const float *g = floats(t, z.all, (int)below(t, FLOAT_KINDS));
    const float *up = floats(t, z.all, (int)below(t, FLOAT_KINDS));
    const float *grad = floats(t, z.all, (int)below(t, FLOAT_KINDS));
    bn_train_gate_back a[2];
    for (int i = 0; i < 2; i++) {
        float *of_gate = buffer(t, z.all * sizeof(float)),
              *of_up = buffer(t, z.all * sizeof(float));
        a[i] = (bn_train_gate_back){of_gate, of_up, grad, g, up, z.n};
        of(t, i)->gate_back(&a[i], 0, z.rows);
    }
    same_floats(t, a[0].of_gate, a[1].of_gate, z.all, "gate_back: gate");
    same_floats(t, a[0].of_up, a[1].of_up, z.all, "gate_back: up");
    done(t, "gate_back");
}

static void check_train_rotated(test *t) {
    const size_t batch = size_to(t, 3), heads = size_to(t, 5), tokens = size_to(t, 20);
    const size_t half = size_to(t, 40), n = 2 * half + below(t, 20), rows = batch * heads * tokens;
    const size_t table = below(t, 2) ? tokens * half : 0;
    const float *x = floats(t, rows * n, (int)below(t, FLOAT_KINDS));
    bn_train_rotated a[2];
    a[0] = (bn_train_rotated){.x = x,
                              .x_strides = {tokens * heads * n, n, heads * n},
                              .cos = floats(t, batch * tokens * half, ORDINARY),
                              .sin = floats(t, batch * tokens * half, ORDINARY),
                              .table_stride = table,
                              .heads = heads,
                              .tokens = tokens,
                              .n = n,
                              .half = half,
                              .inverse = (int)below(t, 2)};
    a[1] = a[0];
    for (int i = 0; i < 2; i++) {
        a[i].y = buffer(t, rows * n * sizeof(float));
        of(t, i)->rotated(&a[i], 0, rows);
    }
    same_floats(t, a[0].y, a[1].y, rows * n, "rotated");
    done(t, "rotated");
}

static void check_train_softmax(test *t) {
    const size_t batch = size_to(t, 3), heads = size_to(t, 4), tokens = size_to(t, 40);
    const int causal = (int)below(t, 2), biased = (int)below(t, 2);
    const size_t n = causal && !biased ? tokens : size_to(t, 300), rows = batch * heads * tokens;
    float *bias = biased ? floats(t, batch * tokens * n, ORDINARY) : NULL;
    for (size_t i = 0; bias && i < batch * tokens * n; i++)
        if (below(t, 2))
            bias[i] = -INFINITY;
    bn_train_softmax a[2];
    a[0] = (bn_train_softmax){.scores = some_bf16(t, rows * n, (int)below(t, FLOAT_KINDS)),
                              .bias = bias,
                              .bias_stride = below(t, 2) ? tokens * n : 0,
                              .heads = heads,
                              .tokens = tokens,
                              .n = n,
                              .scale = 0.125f,
                              .causal = causal};
    a[1] = a[0];
    for (int i = 0; i < 2; i++) {
        a[i].p = buffer(t, rows * n * sizeof(uint16_t));
        of(t, i)->softmax(&a[i], 0, rows);
    }
    same_bf16(t, a[0].p, a[1].p, rows * n, "softmax");
    done(t, "softmax");
}

static void check_train_entropy(test *t) {
    const size_t rows = size_to(t, 9), n = size_to(t, below(t, 4) ? 300 : 3000), all = rows * n;
    const float *x = floats(t, all, (int)below(t, FLOAT_KINDS));
    int64_t *targets = buffer(t, rows * sizeof *targets);
    for (size_t i = 0; i < rows; i++)
        targets[i] = (int64_t)below(t, n + 1) - 1;
    bn_train_entropy a[2], b[2];
    for (int i = 0; i < 2; i++) {
        float *loss = buffer(t, rows * sizeof *loss);
        a[i] = (bn_train_entropy){{buffer(t, all * sizeof(float)), NULL}, loss, x, targets, n};
        b[i] = (bn_train_entropy){{NULL, buffer(t, all * sizeof(uint16_t))}, loss, x, targets, n};
        of(t, i)->entropy(&b[i], 0, rows);
        of(t, i)->entropy(&a[i], 0, rows);
    }
    same_floats(t, a[0].loss, a[1].loss, rows, "entropy: loss");
    same_floats(t, a[0].of_z.f32, a[1].of_z.f32, all, "entropy");
    same_bf16(t, b[0].of_z.bf16, b[1].of_z.bf16, all, "entropy in bf16");
    done(t, "entropy");
}

#endif
