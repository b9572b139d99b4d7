/* SPDX-License-Identifier: MIT
 *
 * check_products.h: products of ternary matrices stored as tiles.
 */
#ifndef BITNET_TESTS_CHECK_PRODUCTS_H
#define BITNET_TESTS_CHECK_PRODUCTS_H

#include "test.h"

enum { TERNARY, LOOKUP, TRIT, SKETCH };

typedef struct problem {
    bn_matmul m;
    size_t acc_bytes;
    int op;
} problem;

enum { RANDOM, ALL_LARGEST, ALL_SMALLEST, ALTERNATING, DAMAGED, MATMUL_KINDS };

/* Weight byte and activation of a kind: random, or such that they drive sums to an extreme. */
static uint8_t weight_byte(test *t, int op, int kind) {
    uint8_t byte = (uint8_t)check_random(&t->random);
    if (op == TRIT || op == SKETCH) /* all bytes are valid; 0xff is five codes of 2 or four of 3 */
        return kind == RANDOM || kind == DAMAGED ? byte : 0xff;
    if (kind == DAMAGED)
        return byte;
    if (kind != RANDOM)
        return 0xaa; /* four codes of 2 */
    const uint8_t threes = byte & (uint8_t)(byte >> 1) & 0x55;
    return (uint8_t)(byte - threes); /* 3 becomes 2 */
}

static int8_t activation(test *t, int kind, size_t k) {
    switch (kind) {
    case ALL_LARGEST:
        return 127;
    case ALL_SMALLEST:
        return -127;
    case ALTERNATING: /* alternating chunks of extremes */
        return k / 64 % 2 ? -127 : 127;
    default:
        return (int8_t)((int)below(t, 255) - 127);
    }
}

static problem random_problem(test *t, int op, int kind, size_t most_tiles) {
    const size_t tile_k = op == TRIT ? BN_TRIT_TILE_K : BN_TERNARY_TILE_K;
    problem p = {.op = op};
    const int many = below(t, 8) == 0; /* tokens: trits are repacked, AMX uses several blocks */
    bn_matmul *m = &p.m;
    m->k_tiles = size_to(t, many && most_tiles > 300 ? 300 : most_tiles);
    m->panels = size_to(t, many && (op == TERNARY || op == SKETCH) ? 4 : 9);
    m->tokens = op == LOOKUP ? 1 + below(t, t->tier->products.lookup_tokens)
                : !many      ? size_to(t, 14)
                             : 15 + below(t, op == TRIT ? 82 : 286);
    m->panel_stride = (m->k_tiles + below(t, 3)) * BN_TILE_BYTES;
    m->acc_stride = BN_PANEL * (m->panels + below(t, 2));
    const size_t k = m->k_tiles * tile_k, row = (k + BN_Q_ALIGN - 1) / BN_Q_ALIGN * BN_Q_ALIGN;
    m->q_stride = row + below(t, 2) * BN_Q_ALIGN;

    const size_t w_bytes = (m->panels - 1) * m->panel_stride + m->k_tiles * BN_TILE_BYTES;
    uint8_t *w = buffer(t, w_bytes);
    for (size_t i = 0; i < w_bytes; i++)
        w[i] = weight_byte(t, op, kind);
    m->tiles = w;
    int8_t *q = buffer(t, (m->tokens - 1) * m->q_stride + row);
    memset(q, 0, (m->tokens - 1) * m->q_stride + row);
    for (size_t i = 0; i < m->tokens; i++)
        for (size_t j = 0; j < k; j++)
            q[i * m->q_stride + j] = activation(t, kind, j);
    m->q = q;
    p.acc_bytes = ((m->tokens - 1) * m->acc_stride + BN_PANEL * m->panels) * sizeof *m->acc;
    return p;
}

static const int32_t *run_problem(test *t, const problem *p, const bn_kernels *kernels) {
    bn_matmul m = p->m;
    m.acc = buffer(t, p->acc_bytes);
    if (p->op == LOOKUP) {
        const size_t bytes = bn_lookup_bytes(m.panels * BN_PANEL);
        void *scratch = memset(buffer(t, bytes), 0, bytes);
        for (int twice = 0; twice < 2; twice++) /* scratch need not be cleared again */
            kernels->products.ternary_lookup(&m, scratch);
    } else {
        (p->op == TERNARY  ? kernels->products.ternary_matmul
         : p->op == SKETCH ? kernels->products.sketch_matmul
                           : kernels->products.trit_matmul)(&m);
    }
    return m.acc;
}

static void check_matmul(test *t, int op, const char *what) {
    const int kind = (int)below(t, MATMUL_KINDS);
    const size_t large = op == TRIT ? BN_TRIT_MAX_K / BN_TRIT_TILE_K : 200;
    const problem p = random_problem(t, op, kind, below(t, 8) ? 40 : large);
    const int32_t *found = run_problem(t, &p, t->tier), *expected = run_problem(t, &p, t->scalar);
    if (kind != DAMAGED || op == TRIT ||
        op == SKETCH) /* invalid codes may give any result, but must not fault */
        same_bytes(t, found, expected, p.acc_bytes, what);
    done(t, what);
}

static const size_t timed_cols[] = {2560, 6912};
static const size_t timed_tokens[] = {1, 2, 3, 4, 6, 8, 12, 16, 32, 128};

enum { N_TIMED = sizeof timed_tokens / sizeof *timed_tokens };

/* Each of the shapes above; bytes: per weight. */
static void time_shapes(bench *b, const char *name, void (*call)(bench *), double bytes) {
    for (size_t c = 0; c < 2; c++)
        for (size_t t = 0; t < N_TIMED; t++) {
            b->rows = BENCH_PANELS * BN_PANEL, b->cols = timed_cols[c], b->at = 0;
            b->tokens = timed_tokens[t];
            const double weights = (double)(b->rows * b->cols);
            bench_line(b, name, call, weights * (double)b->tokens, weights * bytes);
        }
}

/* A product of the next `rows` rows of a matrix that no cache holds, as called by linear.c and
 * lookup.c. */
static bn_matmul next_matmul(bench *b, size_t rows, size_t tile_k) {
    const size_t k_tiles = (b->cols + tile_k - 1) / tile_k, panels = rows / BN_PANEL;
    return (bn_matmul){.acc = b->acc,
                       .acc_stride = rows,
                       .tiles = next_weights(b, panels * k_tiles * BN_TILE_BYTES),
                       .panel_stride = k_tiles * BN_TILE_BYTES,
                       .panels = panels,
                       .k_tiles = k_tiles,
                       .q = b->q,
                       .q_stride = bn_q_row(b->cols) | BN_Q_ALIGN,
                       .tokens = b->tokens};
}

/* --- ternary_matmul --- */

static void check_ternary(test *t) {
    check_matmul(t, TERNARY, "ternary_matmul");
}

static void call_ternary(bench *b) {
    const bn_matmul m = next_matmul(b, b->rows, BN_TERNARY_TILE_K);
    b->k->products.ternary_matmul(&m);
}

static void time_ternary(bench *b) {
    time_shapes(b, "ternary_matmul", call_ternary, 1.0 / 4);
}

/* --- ternary_scaled --- */

static void check_scaled(test *t) {
    problem p = random_problem(t, TERNARY, (int)below(t, DAMAGED), below(t, 8) ? 40 : 200);
    bn_matmul *m = &p.m;
    const size_t n = m->panels * BN_PANEL - below(t, BN_PANEL), stride = n + below(t, 9);
    const int each = (int)below(t, 2), accumulate = (int)below(t, 2);
    const float *before = floats(t, m->tokens * stride, ORDINARY);
    float *y[2];
    m->acc = buffer(t, p.acc_bytes);
    bn_scaling a = {.y_stride = stride,
                    .acc = m->acc,
                    .acc_stride = m->acc_stride,
                    .q_sums = below(t, 2) ? integers(t, m->tokens, 20000) : NULL,
                    .s = floats(t, m->tokens, ORDINARY),
                    .scales = floats(t, each ? n : 1, ORDINARY),
                    .scale_each = each,
                    .accumulate = accumulate,
                    .bias = below(t, 2) ? floats(t, n, ORDINARY) : NULL,
                    .weight = random_float(t, ORDINARY),
                    .n = n,
                    .tokens = m->tokens};
    for (int i = 0; i < 2; i++) {
        a.y = y[i] = buffer(t, m->tokens * stride * sizeof(float));
        memcpy(y[i], before, m->tokens * stride * sizeof(float));
        (i ? t->scalar : t->tier)->products.ternary_scaled(m, &a);
    }
    same_floats(t, y[0], y[1], m->tokens * stride, "ternary_scaled");
    done(t, "ternary_scaled");
}

/* --- sketch_matmul --- */

static void check_sketch(test *t) {
    check_matmul(t, SKETCH, "sketch_matmul");
}

/* --- ternary_lookup --- */

static void check_lookup(test *t) {
    if (t->tier->products.lookup_tokens > 0)
        check_matmul(t, LOOKUP, "ternary_lookup");
}

static void call_lookup(bench *b) {
    const bn_matmul m = next_matmul(b, b->rows, BN_TERNARY_TILE_K);
    b->k->products.ternary_lookup(&m, b->scratch);
}

static void time_lookup(bench *b) {
    b->tokens = b->k->products.lookup_tokens, b->at = 0;
    for (b->rows = 640; b->rows <= 2560 && b->tokens > 0; b->rows *= 2)
        for (size_t c = 0; c < 2; c++) {
            b->cols = timed_cols[c];
            const double weights = (double)(b->rows * b->cols);
            bench_line(b, "ternary_lookup", call_lookup, weights * (double)b->tokens, weights / 4);
        }
}

/* --- trit_matmul --- */

/* Every byte of five trits, one column at a time: the codes are the digits of its number in base
 * 3. */
static void check_trit_codes(test *t) {
    enum { CODES = 243, TOKENS = BN_TRIT_TILE_K };
    const bn_matmul m = {.acc = buffer(t, TOKENS * CODES * BN_PANEL * sizeof *m.acc),
                         .acc_stride = CODES * BN_PANEL,
                         .tiles = buffer(t, CODES * BN_TILE_BYTES),
                         .panel_stride = BN_TILE_BYTES,
                         .panels = CODES,
                         .k_tiles = 1,
                         .q = buffer(t, TOKENS * BN_Q_ALIGN),
                         .q_stride = BN_Q_ALIGN,
                         .tokens = TOKENS};
    for (size_t n = 0; n < CODES; n++) /* ceil(256 n / 243) */
        memset((uint8_t *)(uintptr_t)m.tiles + n * BN_TILE_BYTES, (int)((256 * n + 242) / 243),
               BN_TILE_BYTES);
    memset((int8_t *)(uintptr_t)m.q, 0, TOKENS * BN_Q_ALIGN);
    for (size_t col = 0; col < TOKENS; col++)
        ((int8_t *)(uintptr_t)m.q)[col * BN_Q_ALIGN + col] = 1;
    t->tier->products.trit_matmul(&m);
    static const int32_t power[] = {81, 27, 9, 3, 1};
    for (size_t col = 0; col < TOKENS; col++)
        for (size_t i = 0; i < CODES * BN_PANEL; i++)
            CHECK_EQ(m.acc[col * m.acc_stride + i], (int32_t)(i / BN_PANEL) / power[col / 4] % 3);
    done(t, "trit_matmul");
}

static void check_trit(test *t) {
    check_matmul(t, TRIT, "trit_matmul");
    if (below(t, 16) == 0)
        check_trit_codes(t);
}

static void call_trit(bench *b) {
    const bn_matmul m = next_matmul(b, b->rows, BN_TRIT_TILE_K);
    b->k->products.trit_matmul(&m);
}

static void time_trit(bench *b) {
    time_shapes(b, "trit_matmul", call_trit, 1.0 / 5);
}

/* --- ternary_grouped --- */

/* One output by the rule of products.h, directly from the codes, one product at a time. */
static float grouped_value(const test *t, const bn_grouped *m, size_t token, size_t row) {
    const size_t n_groups = (m->k_tiles + 7) / 8;
    const uint8_t *panel = m->tiles + row / 16 * m->k_tiles * 64;
    float y = 0;
    for (size_t g = 0; g < n_groups; g++) {
        int32_t d = 0;
        float scale;
        for (size_t k = 128 * g; k < 128 * (g + 1) && k < 16 * m->k_tiles; k++) {
            const uint8_t byte = panel[k / 16 * 64 + row % 16 * 4 + k % 4];
            d += ((byte >> k % 16 / 4 * 2 & 3) - 1) * m->q[token * m->q_stride + k];
        }
        t->scalar->bytes.f16_to_f32(&scale, &m->scales[(row / 16 * n_groups + g) * 16 + row % 16],
                                    1);
        y = fmaf((float)d, scale, y);
    }
    return y;
}

static void check_grouped(test *t) {
    const int kind = (int)below(t, MATMUL_KINDS - 1); /* only weights that a file may hold */
    bn_grouped m = {.panels = size_to(t, 5),
                    .k_tiles = size_to(t, 130),
                    .tokens = size_to(t, below(t, 8) ? 80 : 300)};
    const size_t k = m.k_tiles * BN_TERNARY_TILE_K, n_groups = (m.k_tiles + 7) / 8;
    m.q_stride = (k + BN_Q_ALIGN - 1) / BN_Q_ALIGN * BN_Q_ALIGN + below(t, 2) * BN_Q_ALIGN;
    m.q_sums_stride = n_groups + below(t, 2);
    m.y_stride = BN_PANEL * (m.panels + below(t, 2));

    uint8_t *tiles = buffer(t, m.panels * m.k_tiles * BN_TILE_BYTES);
    for (size_t i = 0; i < m.panels * m.k_tiles * BN_TILE_BYTES; i++)
        tiles[i] = weight_byte(t, TERNARY, kind);
    int8_t *q = buffer(t, m.tokens * m.q_stride);
    int32_t *sums = buffer(t, m.tokens * m.q_sums_stride * sizeof *sums);
    memset(q, 0, m.tokens * m.q_stride);
    memset(sums, 0, m.tokens * m.q_sums_stride * sizeof *sums);
    for (size_t i = 0; i < m.tokens; i++)
        for (size_t j = 0; j < k; j++) {
            q[i * m.q_stride + j] = activation(t, kind, j);
            sums[i * m.q_sums_stride + j / 128] += q[i * m.q_stride + j];
        }
    m.tiles = tiles, m.q = q, m.q_sums = sums;
    m.scales = halves(t, m.panels * n_groups * BN_PANEL, (int)below(t, 2));

    const size_t n = (m.tokens - 1) * m.y_stride + BN_PANEL * m.panels;
    float *y[2];
    for (int i = 0; i < 2; i++) {
        m.y = y[i] = buffer(t, n * sizeof(float));
        (i ? t->scalar : t->tier)->products.ternary_grouped(&m);
    }
    same_bytes(t, y[0], y[1], n * sizeof(float), "ternary_grouped");
    const size_t token = below(t, m.tokens), row = below(t, BN_PANEL * m.panels);
    const float expected = grouped_value(t, &m, token, row);
    same_bytes(t, &y[0][token * m.y_stride + row], &expected, sizeof expected, "ternary_grouped");
    done(t, "ternary_grouped");
}

static void call_grouped(bench *b) {
    const size_t k_tiles = b->cols / BN_TERNARY_TILE_K;
    const size_t codes = BENCH_PANELS * k_tiles * BN_TILE_BYTES;
    const size_t scales = BENCH_PANELS * b->cols / BN_SCALE_GROUP_K * BN_PANEL * sizeof(uint16_t);
    const uint8_t *tiles = next_weights(b, codes + scales);
    b->k->products.ternary_grouped(
        &(bn_grouped){.y = b->y,
                      .y_stride = BENCH_PANELS * BN_PANEL,
                      .tiles = tiles,
                      .scales = (const uint16_t *)(const void *)(tiles + codes),
                      .panels = BENCH_PANELS,
                      .k_tiles = k_tiles,
                      .q = b->q,
                      .q_stride = bn_q_row(b->cols) | BN_Q_ALIGN,
                      .q_sums = b->acc,
                      .q_sums_stride = b->cols / BN_SCALE_GROUP_K,
                      .tokens = b->tokens});
}

static void time_grouped(bench *b) {
    time_shapes(b, "ternary_grouped", call_grouped, 1.0 / 4 + 1.0 / 64);
}

#endif
