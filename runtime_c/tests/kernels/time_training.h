/* SPDX-License-Identifier: MIT
 *
 * time_training.h: speed of the operations of a training step, on a block of rows in the cache.
 */
#ifndef BITNET_TESTS_TIME_TRAINING_H
#define BITNET_TESTS_TIME_TRAINING_H

#include "bench.h"

enum { TRAINED = 256, TIMED_ROWS = BN_TRAIN_ROWS, TIMED = TRAINED * TIMED_ROWS };

/* bytes: read and written for each element */
static void time_rows(bench *b, const char *name, void (*call)(bench *), double bytes) {
    b->rows = TIMED_ROWS, b->cols = TRAINED, b->tokens = 1;
    bench_line(b, name, call, TIMED, bytes * TIMED);
}

static void call_train_codes(bench *b) {
    const bn_train_codes a = {b->q, b->y, b->x, TRAINED};
    b->k->training.codes(&a, 0, TIMED_ROWS);
}

static void time_train_codes(bench *b) {
    time_rows(b, "codes", call_train_codes, 5);
}

static void call_train_between(bench *b) {
    const float amount = 0.25f;
    const bn_train_between a = {{NULL, (uint16_t *)(void *)b->y}, b->x, TRAINED, &amount};
    b->k->training.between(&a, 0, TIMED_ROWS);
}

static void time_train_between(bench *b) {
    time_rows(b, "between", call_train_between, 6);
}

static void call_train_magnitudes(bench *b) {
    const bn_train_magnitudes a = {(double *)(void *)b->y, b->x, TRAINED};
    b->k->training.magnitudes(&a, 0, TIMED_ROWS);
}

static void time_train_magnitudes(bench *b) {
    time_rows(b, "magnitudes", call_train_magnitudes, 4);
}

static void call_train_ternary(bench *b) {
    const bn_train_ternary a = {b->q, b->x, b->x, 0, TRAINED};
    b->k->training.ternary(&a, 0, TIMED_ROWS);
}

static void time_train_ternary(bench *b) {
    time_rows(b, "ternary", call_train_ternary, 5);
}

static void call_train_values(bench *b) {
    const bn_train_values a = {{NULL, (uint16_t *)(void *)b->y}, b->q, b->x, TRAINED};
    b->k->training.values(&a, 0, TIMED_ROWS);
}

static void time_train_values(bench *b) {
    time_rows(b, "values", call_train_values, 3);
}

static void call_train_tiles(bench *b) {
    const bn_train_tiles a = {(uint8_t *)b->acc, b->q, TRAINED};
    b->k->training.tiles(&a, 0, TIMED_ROWS);
}

static void time_train_tiles(bench *b) {
    memset(b->q, 1, TIMED);
    time_rows(b, "tiles", call_train_tiles, 1.25);
}

static void call_train_scaled(bench *b) {
    const bn_train_scaled a = {b->y, b->x, 0, b->x, TRAINED};
    b->k->training.scaled(&a, 0, TIMED_ROWS);
}

static void time_train_scaled(bench *b) {
    time_rows(b, "scaled", call_train_scaled, 8);
}

static void call_train_norm(bench *b) {
    const bn_train_norm a = {b->y, b->x, b->x, TRAINED, 1e-5f};
    b->k->training.norm(&a, 0, TIMED_ROWS);
}

static void time_train_norm(bench *b) {
    time_rows(b, "norm", call_train_norm, 8);
}

static void call_train_norm_back(bench *b) {
    const bn_train_norm_back a = {b->y, b->y + TIMED, b->x, b->x + TIMED, b->x, TRAINED, 1e-5f};
    b->k->training.norm_back(&a, 0, TIMED_ROWS);
}

static void time_train_norm_back(bench *b) {
    time_rows(b, "norm_back", call_train_norm_back, 12);
}

static void call_train_gate(bench *b) {
    const bn_train_gate a = {b->y, b->x, b->x + TIMED, TRAINED};
    b->k->training.gate(&a, 0, TIMED_ROWS);
}

static void time_train_gate(bench *b) {
    time_rows(b, "gate", call_train_gate, 12);
}

static void call_train_gate_back(bench *b) {
    const bn_train_gate_back a = {b->y,         b->y + TIMED,     b->x,
                                  b->x + TIMED, b->x + 2 * TIMED, TRAINED};
    b->k->training.gate_back(&a, 0, TIMED_ROWS);
}

static void time_train_gate_back(bench *b) {
    time_rows(b, "gate_back", call_train_gate_back, 20);
}

/* Four heads of 64 in 64 tokens. */
static void call_train_rotated(bench *b) {
    const bn_train_rotated a = {.y = b->y,
                                .x = b->x,
                                .x_strides = {0, 64, TRAINED},
                                .cos = b->x + TIMED,
                                .sin = b->x + 2 * TIMED,
                                .heads = 4,
                                .tokens = 64,
                                .n = 64,
                                .half = 32};
    b->k->training.rotated(&a, 0, 4 * 64);
}

static void time_train_rotated(bench *b) {
    time_rows(b, "rotated", call_train_rotated, 8);
}

static void call_train_softmax(bench *b) {
    const bn_train_softmax a = {.p = (uint16_t *)(void *)b->y,
                                .scores = (const uint16_t *)(const void *)b->acc,
                                .heads = 1,
                                .tokens = TIMED_ROWS,
                                .n = TRAINED,
                                .scale = 0.125f};
    b->k->training.softmax(&a, 0, TIMED_ROWS);
}

static void time_train_softmax(bench *b) {
    for (size_t i = 0; i < TIMED; i++)
        ((uint16_t *)(void *)b->acc)[i] = (uint16_t)(0x3F80 + i % 64); /* from 1 on */
    time_rows(b, "softmax", call_train_softmax, 4);
}

static void call_train_entropy(bench *b) {
    static const int64_t targets[TIMED_ROWS];
    const bn_train_entropy a = {
        {NULL, (uint16_t *)(void *)b->y}, b->y + TIMED, b->x, targets, TRAINED};
    b->k->training.entropy(&a, 0, TIMED_ROWS);
}

static void time_train_entropy(bench *b) {
    time_rows(b, "entropy", call_train_entropy, 6);
}

#endif
