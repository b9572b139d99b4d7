/* SPDX-License-Identifier: MIT
 *
 * check_rows.h: products of int8 and float matrices stored by rows, and the peak rate.
 */
#ifndef BITNET_TESTS_CHECK_ROWS_H
#define BITNET_TESTS_CHECK_ROWS_H

#include "check_products.h" /* activations that drive sums to an extreme */

/* --- int8_rows --- */

static void check_int8_rows(test *t) {
    const int kind = (int)below(t, MATMUL_KINDS);
    const size_t units = size_to(t, below(t, 8) ? 12 : 200), most = below(t, 8) ? 14 : 160;
    bn_int8_rows m = {.row_bytes = units * BN_INT8_UNIT,
                      .rows = size_to(t, 40),
                      .q_stride = (units + below(t, 2)) * BN_Q_ALIGN,
                      .tokens = size_to(t, most)};
    const size_t listed = below(t, 2) ? size_to(t, 40) : 0;
    m.acc_stride = bn_max(m.rows, listed) + below(t, 2);
    int8_t *codes = buffer(t, m.rows * m.row_bytes), *q = buffer(t, m.tokens * m.q_stride);
    int32_t *sums = buffer(t, m.tokens * sizeof *sums);
    for (size_t i = 0; i < m.rows * m.row_bytes; i++)
        codes[i] = kind == RANDOM || kind == DAMAGED ? activation(t, RANDOM, i)
                   : check_random(&t->random) % 64   ? (int8_t)(i / m.row_bytes % 2 ? -127 : 127)
                                                     : 0;
    memset(q, 0, m.tokens * m.q_stride);
    memset(sums, 0, m.tokens * sizeof *sums);
    for (size_t i = 0; i < m.tokens; i++)
        for (size_t j = 0; j < m.row_bytes; j++)
            sums[i] += q[i * m.q_stride + j] = activation(t, kind, j);
    m.codes = codes, m.q = q, m.q_sums = sums;
    if (listed) { /* some rows, possibly repeated, and one token */
        uint32_t *list = buffer(t, listed * sizeof *list);
        for (size_t i = 0; i < listed; i++)
            list[i] = (uint32_t)below(t, m.rows);
        m.list = list, m.tokens = 1;
    }
    const size_t all = m.rows * m.row_bytes;
    m.rows = listed ? listed : m.rows;
    const size_t bytes = ((m.tokens - 1) * m.acc_stride + m.rows) * sizeof *m.acc;
    int32_t *acc[2];
    for (int i = 0; i < 2; i++) {
        m.acc = acc[i] = buffer(t, bytes);
        (i ? t->scalar : t->tier)->products.int8_rows(&m);
    }
    same_bytes(t, acc[0], acc[1], bytes, "int8_rows");
    codes[below(t, all)] = -128; /* not valid in a file, but must not fault */
    m.acc = acc[0];
    t->tier->products.int8_rows(&m);
    done(t, "int8_rows");
}

static void call_int8(bench *b) {
    b->k->products.int8_rows(&(bn_int8_rows){.acc = b->acc,
                                             .acc_stride = b->rows,
                                             .codes = next_weights(b, b->rows * b->cols),
                                             .row_bytes = b->cols,
                                             .rows = b->rows,
                                             .q = b->q,
                                             .q_stride = bn_q_row(b->cols) | BN_Q_ALIGN,
                                             .q_sums = b->acc, /* any values */
                                             .tokens = b->tokens});
}

static void time_int8_rows(bench *b) {
    static const size_t tokens[] = {1, 2, 8, 16, 128};
    b->rows = BENCH_PANELS * BN_PANEL, b->cols = 2560, b->at = 0;
    const double weights = (double)(b->rows * b->cols);
    for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
        b->tokens = tokens[t];
        bench_line(b, "int8_rows", call_int8, weights * (double)b->tokens, weights);
    }
}

/* --- f32_matmul, f16_matmul --- */

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
            k->products.f16_matmul(y[i], y_stride, w, rows, cols, x, x_stride, tokens);
        else
            k->products.f32_matmul(y[i], y_stride, w, rows, cols, x, x_stride, tokens);
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

static void check_int8_add_rows(test *t) {
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n = size_to(t, 200), rank = size_to(t, 20), tokens = size_to(t, 9);
    bn_add_rows a = {.w_stride = (n + BN_INT8_UNIT - 1) / BN_INT8_UNIT * BN_INT8_UNIT,
                     .y_stride = n + below(t, 5),
                     .x_stride = rank + below(t, 5),
                     .rank = rank,
                     .weight = below(t, 2) ? 1.0f : 0.37f,
                     .n = n,
                     .tokens = tokens};
    const size_t n_y = (tokens - 1) * a.y_stride + n;
    a.x = floats(t, (tokens - 1) * a.x_stride + rank, kind);
    int8_t *w = buffer(t, rank * a.w_stride);
    for (size_t i = 0; i < rank * a.w_stride; i++)
        w[i] = (int8_t)below(t, 256);
    a.w = w;
    const float *before = floats(t, n_y, kind);
    float *y[2];
    for (int i = 0; i < 2; i++) {
        const bn_kernels *k = i ? t->scalar : t->tier;
        a.y = y[i] = buffer(t, n_y * sizeof(float));
        memcpy(a.y, before, n_y * sizeof(float));
        k->products.int8_add_rows(&a);
    }
    same_floats(t, y[0], y[1], n_y, "int8_add_rows");
    done(t, "int8_add_rows");
}

static void call_f32(bench *b) {
    b->k->products.f32_matmul(b->y, b->rows, (const float *)(const void *)b->weights, b->rows,
                              b->cols, b->x, b->cols, b->tokens);
}

static void call_f16(bench *b) {
    b->k->products.f16_matmul(b->y, b->rows, (const uint16_t *)(const void *)b->weights, b->rows,
                              b->cols, b->x, b->cols, b->tokens);
}

static void time_floats(bench *b, const char *name, void (*call)(bench *), double bytes) {
    b->rows = 128, b->cols = 2560;
    const double weights = (double)(b->rows * b->cols);
    for (b->tokens = 1; b->tokens <= 16; b->tokens *= 4)
        bench_line(b, name, call, weights * (double)b->tokens, weights * bytes);
}

static void time_f32_matmul(bench *b) {
    time_floats(b, "f32_matmul", call_f32, 4);
}

static void time_f16_matmul(bench *b) {
    time_floats(b, "f16_matmul", call_f16, 2);
}

static void call_add_rows(bench *b) {
    b->k->products.int8_add_rows(&(bn_add_rows){.y = b->y,
                                                .y_stride = b->cols,
                                                .w = (const int8_t *)b->weights,
                                                .w_stride = b->cols,
                                                .rank = b->rows,
                                                .x = b->x,
                                                .x_stride = b->rows,
                                                .weight = 1,
                                                .n = b->cols,
                                                .tokens = b->tokens});
}

/* An adapter of rank 16. */
static void time_int8_add_rows(bench *b) {
    b->rows = 16, b->cols = 512;
    const double weights = (double)(b->rows * b->cols);
    for (b->tokens = 1; b->tokens <= 16; b->tokens *= 4)
        bench_line(b, "int8_add_rows", call_add_rows, weights * (double)b->tokens, weights);
}

/* --- int8_peak, which bench_limits times --- */

static void check_peak(test *t) {
    int32_t sink = 0;
    const uint64_t macs = t->tier->products.int8_peak(16, &sink);
    CHECK(macs > 0 && t->tier->products.int8_peak(32, &sink) == 2 * macs);
}

#endif
