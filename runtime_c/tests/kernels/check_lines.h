/* SPDX-License-Identifier: MIT
 *
 * check_lines.h: integer products with listed lines (FORMAT.md §4).
 */
#ifndef BITNET_TESTS_CHECK_LINES_H
#define BITNET_TESTS_CHECK_LINES_H

#include "test.h"

static int8_t *activations_of(test *t, size_t n, size_t padded, int largest) {
    int8_t *q = buffer(t, padded);
    memset(q, 0, padded);
    for (size_t i = 0; i < n; i++)
        q[i] = (int8_t)(largest ? largest : (int)below(t, 255) - 127);
    return q;
}

/* Lines with codes that a file may hold, all the largest or random, and a list in random order. */
static bn_lines random_lines(test *t, size_t codes, size_t n, int largest) {
    const size_t lines = size_to(t, 200);
    bn_lines m = {
        .line_bytes = (codes + 255) / 256 * 64 + below(t, 2) * 64, .codes = codes, .n = n};
    const size_t bytes = (lines - 1) * m.line_bytes + (codes + 255) / 256 * 64;
    uint8_t *line = buffer(t, bytes);
    for (size_t i = 0; i < bytes; i++) {
        const uint8_t byte = (uint8_t)check_random(&t->random);
        line[i] = largest ? 0xaa : (uint8_t)(byte - (byte & (uint8_t)(byte >> 1) & 0x55));
    }
    uint32_t *list = buffer(t, n * sizeof *list);
    for (size_t i = 0; i < n; i++)
        list[i] = (uint32_t)below(t, lines);
    m.lines = line, m.list = list;
    return m;
}

/* As FORMAT.md defines it: byte i % 16 of unit i / 64, field i % 64 / 16. */
static int32_t code_of(const bn_lines *m, size_t entry, size_t i) {
    const uint8_t byte = m->lines[m->list[entry] * m->line_bytes + i / 64 * 16 + i % 16];
    return byte >> i % 64 / 16 * 2 & 3;
}

static void check_row_lines(test *t) {
    const int largest = below(t, 3) == 0 ? (below(t, 2) ? 127 : -127) : 0;
    bn_lines m = random_lines(t, size_to(t, 1200), size_to(t, 150), largest);
    m.q = activations_of(t, m.codes, bn_q_row(m.codes), largest);
    int32_t *sum[2];
    for (int i = 0; i < 2; i++) {
        m.acc = sum[i] = buffer(t, m.n * sizeof(int32_t));
        (i ? t->scalar : t->tier)->products.ternary_rows(&m);
    }
    same_bytes(t, sum[0], sum[1], m.n * sizeof(int32_t), "ternary_rows");
    int32_t expected = 0;
    for (size_t k = 0; k < m.codes; k++)
        expected += code_of(&m, m.n - 1, k) * m.q[k];
    CHECK_EQ(sum[0][m.n - 1], expected);
    done(t, "ternary_rows");
}

static void check_column_lines(test *t) {
    const int largest = below(t, 3) == 0 ? (below(t, 2) ? 127 : -127) : 0;
    const size_t n = 4 * size_to(t, below(t, 16) ? 60 : BN_LIST_MOST / 4);
    bn_lines m = random_lines(t, 256 * size_to(t, 3), n, largest);
    m.q = activations_of(t, n, n, largest);
    int32_t *sum[2];
    for (int i = 0; i < 2; i++) { /* adds to acc */
        m.acc = sum[i] = buffer(t, m.codes * sizeof(int32_t));
        for (size_t r = 0; r < m.codes; r++)
            m.acc[r] = 1000 - (int32_t)r;
        (i ? t->scalar : t->tier)->products.ternary_columns(&m);
    }
    same_bytes(t, sum[0], sum[1], m.codes * sizeof(int32_t), "ternary_columns");
    const size_t r = below(t, m.codes);
    int32_t expected = 1000 - (int32_t)r;
    for (size_t i = 0; i < n; i++)
        expected += code_of(&m, i, r) * m.q[i];
    CHECK_EQ(sum[0][r], expected);
    done(t, "ternary_columns");
}

/* One in five of the next b->rows lines, unevenly spaced. */
static bn_lines next_lines(bench *b, uint32_t list[2048]) {
    size_t n = 0;
    for (; 5 * (n + 1) <= b->rows; n++)
        list[n] = (uint32_t)(5 * n + n * n % 5);
    return (bn_lines){.acc = b->acc,
                      .lines = next_weights(b, b->rows * b->cols / 4),
                      .line_bytes = b->cols / 4,
                      .codes = b->cols,
                      .list = list,
                      .n = n / 4 * 4,
                      .q = b->q};
}

static void call_rows(bench *b) {
    uint32_t list[2048];
    const bn_lines lines = next_lines(b, list);
    b->k->products.ternary_rows(&lines);
}

static void call_columns(bench *b) {
    uint32_t list[2048];
    const bn_lines lines = next_lines(b, list);
    b->k->products.ternary_columns(&lines);
}

/* The lines of one layer of 6912 neurons. */
static void time_lines(bench *b, const char *name, void (*call)(bench *)) {
    b->rows = 6912, b->cols = 2560, b->tokens = 1, b->at = 0;
    const double listed = (double)(b->rows / 20 * 4 * b->cols);
    bench_line(b, name, call, listed, listed / 4);
}

static void time_row_lines(bench *b) {
    time_lines(b, "ternary_rows", call_rows);
}

static void time_column_lines(bench *b) {
    time_lines(b, "ternary_columns", call_columns);
}

#endif
