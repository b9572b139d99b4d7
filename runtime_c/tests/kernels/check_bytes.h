/* SPDX-License-Identifier: MIT
 *
 * check_bytes.h: halves and checksums.
 */
#ifndef BITNET_TESTS_CHECK_BYTES_H
#define BITNET_TESTS_CHECK_BYTES_H

#include "test.h"

static void check_f32_to_f16(test *t) {
    const size_t n = size_to(t, 300);
    const float *x = floats(t, n, (int)below(t, FLOAT_KINDS));
    uint16_t *y[2];
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, n * sizeof(uint16_t));
        (i ? t->scalar : t->tier)->bytes.f32_to_f16(y[i], x, n);
    }
    same_bytes(t, y[0], y[1], n * sizeof(uint16_t), "f32_to_f16");
    done(t, "f32_to_f16");
}

static void call_f32_to_f16(bench *b) {
    b->k->bytes.f32_to_f16((uint16_t *)(void *)b->y, b->x, b->cols);
}

static void time_f32_to_f16(bench *b) {
    time_vector(b, "f32_to_f16", call_f32_to_f16, 4);
}

static void check_f16_to_f32(test *t) {
    const size_t n = size_to(t, 3000), first = below(t, 65536);
    uint16_t *x = buffer(t, n * sizeof(uint16_t));
    float *y[2];
    for (size_t i = 0; i < n; i++)
        x[i] = (uint16_t)(first + i); /* all 65536 values, over many cases */
    for (int i = 0; i < 2; i++) {
        y[i] = buffer(t, n * sizeof(float));
        (i ? t->scalar : t->tier)->bytes.f16_to_f32(y[i], x, n);
    }
    same_bytes(t, y[0], y[1], n * sizeof(float), "f16_to_f32");
    done(t, "f16_to_f32");
}

static void call_f16_to_f32(bench *b) {
    b->k->bytes.f16_to_f32(b->y, (const uint16_t *)(const void *)b->weights, b->cols);
}

static void time_f16_to_f32(bench *b) {
    time_vector(b, "f16_to_f32", call_f16_to_f32, 2);
}

static void check_crc32(test *t) {
    static const uint8_t digits[] = "123456789";
    CHECK_EQ(t->tier->bytes.crc32(0, digits, 9), 0xCBF43926); /* the check value of this CRC */
    const size_t n = below(t, 2) ? below(t, 200) : below(t, 5000), cut = below(t, n + 1);
    uint8_t *p = buffer(t, n);
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)check_random(&t->random);
    const uint32_t start = below(t, 2) ? 0 : (uint32_t)check_random(&t->random);
    const uint32_t expected = t->scalar->bytes.crc32(start, p, n);
    CHECK_EQ(t->tier->bytes.crc32(start, p, n), expected);
    CHECK_EQ(t->tier->bytes.crc32(t->tier->bytes.crc32(start, p, cut), p + cut, n - cut), expected);
    done(t, "crc32");
}

static void call_crc32(bench *b) {
    b->acc[0] = (int32_t)b->k->bytes.crc32(0, b->weights, b->rows);
}

static void time_crc32(bench *b) {
    b->rows = 1 << 18, b->cols = b->tokens = 1;
    bench_line(b, "crc32", call_crc32, (double)b->rows, (double)b->rows);
}

#endif
