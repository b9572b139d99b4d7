/* SPDX-License-Identifier: MIT
 *
 * check_choosing.h: kernels that choose the next token from logits.
 */
#ifndef BITNET_TESTS_CHECK_CHOOSING_H
#define BITNET_TESTS_CHECK_CHOOSING_H

#include "test.h"

static void check_max(test *t) {
    const size_t n = size_to(t, 300);
    float *x = floats(t, n, (int)below(t, FLOAT_KINDS));
    const size_t dull = below(t, 4);
    for (size_t i = 0; i < n && dull == 0; i++)
        x[i] = NAN;
    /* adding 0: the sign of a zero maximum is not specified */
    float found = t->tier->vectors.max(x, n) + 0.0f, expected = t->scalar->vectors.max(x, n) + 0.0f;
    same_floats(t, &found, &expected, 1, "max");
    done(t, "max");
}

static void call_max(bench *b) {
    b->y[0] = b->k->vectors.max(b->x, b->cols);
}

static void time_max(bench *b) {
    time_vector(b, "max", call_max, 4);
}

static void check_reaching(test *t) {
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n = size_to(t, 300);
    const float *x = floats(t, n, kind);
    const float bar = below(t, 4) ? x[below(t, n)] : random_float(t, kind);
    uint32_t *list[2];
    size_t found[2];
    for (int i = 0; i < 2; i++) {
        list[i] = buffer(t, n * sizeof **list);
        found[i] = (i ? t->scalar : t->tier)->vectors.reaching(list[i], x, bar, n);
    }
    CHECK_EQ(found[0], found[1]);
    same_bytes(t, list[0], list[1], found[1] * sizeof **list, "reaching");
    done(t, "reaching");
}

static void call_reaching(bench *b) {
    b->acc[0] = (int32_t)b->k->vectors.reaching((uint32_t *)b->acc, b->x, 1e30f, b->cols);
}

static void time_reaching(bench *b) {
    time_vector(b, "reaching", call_reaching, 4);
}

static bn_estimates random_estimates(test *t, size_t n, int kind) {
    return (bn_estimates){.acc = integers(t, n, 1 << 30),
                          .step = floats(t, n, kind),
                          .deviation = floats(t, n, kind),
                          .scales = floats(t, n, kind),
                          .mean = random_float(t, kind),
                          .unit = random_float(t, kind),
                          .rounding = random_float(t, kind),
                          .noise = random_float(t, kind),
                          .n = n};
}

static void check_estimate(test *t) {
    bn_estimates a = random_estimates(t, size_to(t, 300), (int)below(t, FLOAT_KINDS));
    float *y[2];
    for (int i = 0; i < 2; i++) {
        a.y = y[i] = buffer(t, a.n * sizeof(float));
        (i ? t->scalar : t->tier)->vectors.estimate(&a);
    }
    same_floats(t, y[0], y[1], a.n, "estimate");
    done(t, "estimate");
}

static bn_estimates estimates_of(const bench *b) {
    return (bn_estimates){.y = b->y,
                          .acc = b->acc,
                          .step = b->x,
                          .deviation = b->x,
                          .scales = b->x,
                          .mean = 1,
                          .unit = 1,
                          .noise = 1,
                          .n = b->cols};
}

static void call_estimate(bench *b) {
    const bn_estimates a = estimates_of(b);
    b->k->vectors.estimate(&a);
}

static void time_estimate(bench *b) {
    time_vector(b, "estimate", call_estimate, 16);
}

static void check_may_reach(test *t) {
    const int kind = (int)below(t, FLOAT_KINDS);
    bn_estimates a = random_estimates(t, size_to(t, 300), kind);
    a.y = floats(t, a.n, kind);
    const size_t one = below(t, a.n);
    const float bar = below(t, 4) ? bn_at_most(&a, one) : random_float(t, kind);
    uint32_t *list[2];
    size_t found[2];
    for (int i = 0; i < 2; i++) {
        list[i] = buffer(t, a.n * sizeof **list);
        found[i] = (i ? t->scalar : t->tier)->vectors.may_reach(list[i], &a, bar);
    }
    CHECK_EQ(found[0], found[1]);
    same_bytes(t, list[0], list[1], found[1] * sizeof **list, "may_reach");
    done(t, "may_reach");
}

static void call_may_reach(bench *b) {
    const bn_estimates a = estimates_of(b);
    b->acc[0] = (int32_t)b->k->vectors.may_reach((uint32_t *)b->acc, &a, 1e30f);
}

static void time_may_reach(bench *b) {
    time_vector(b, "may_reach", call_may_reach, 12);
}

static void check_noise(test *t) {
    const size_t n = size_to(t, 300);
    const uint64_t seed = check_random(&t->random);
    const uint32_t position = (uint32_t)check_random(&t->random);
    uint32_t *tokens = buffer(t, n * sizeof *tokens); /* consecutive, or random */
    tokens[0] = (uint32_t)check_random(&t->random);
    for (size_t i = 1; i < n; i++)
        tokens[i] = below(t, 4) ? tokens[i - 1] + 1 : (uint32_t)check_random(&t->random);
    double *u[2];
    for (int i = 0; i < 2; i++) {
        u[i] = buffer(t, n * sizeof(double));
        (i ? t->scalar : t->tier)->vectors.noise(u[i], tokens, n, seed, position);
    }
    same_bytes(t, u[0], u[1], n * sizeof(double), "noise");
    done(t, "noise");
}

static void call_noise(bench *b) {
    b->k->vectors.noise((double *)b->y, (const uint32_t *)b->acc, b->cols, 1, 2);
}

static void time_noise(bench *b) {
    time_vector(b, "noise", call_noise, 4);
}

#endif
