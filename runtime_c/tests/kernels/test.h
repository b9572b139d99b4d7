/* SPDX-License-Identifier: MIT
 *
 * test.h: shared by the tests of kernels. A check creates random inputs, runs a kernel and its
 * scalar counterpart on them, and compares every byte of the two poisoned outputs, including the
 * gaps between rows. Next to each check is a function that times the kernel on the shapes of a
 * model.
 */
#ifndef BITNET_TESTS_TEST_H
#define BITNET_TESTS_TEST_H

#include "bench.h"
#include "guard.h"

#include <math.h>

typedef struct test {
    const bn_kernels *tier, *scalar;
    uint64_t random, seed;
    guard guard;
} test;

/* One kernel: checks a random case, and times the kernel. time is NULL if another kernel's covers
 * it. */
typedef struct kernel_test {
    const char *name;
    void (*check)(test *t);
    void (*time)(bench *b);
} kernel_test;

static size_t below(test *t, size_t n) {
    return check_below(&t->random, n);
}

/* 1 to n, favoring small sizes. */
static size_t size_to(test *t, size_t n) {
    return 1 + below(t, 1 + below(t, n));
}

static void *buffer(test *t, size_t bytes) {
    return guard_new(&t->guard, bytes, &t->random);
}

/* Kinds of floats: ordinary, of all magnitudes, with infinities, with infinities and NaN. */
enum { ORDINARY, WIDE, INFINITE, ANYTHING, FLOAT_KINDS };

static float random_float(test *t, int kind) {
    static const uint32_t special[] = {
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x33000000,
        0x33000001, 0x38800000, 0x387fffff, 0x3f800000, 0x3f000000, 0xbfc00000, 0x42b00000,
        0xc2ac0000, 0x477fe000, 0x477fefff, 0x477ff000, 0xc7800000, 0x7f7fffff, 0xff7fffff,
        0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001, 0xffbfffff};
    enum { FINITE = 21, NUMBERS = 23, ALL = sizeof special / sizeof *special };
    const int known = kind == ANYTHING ? ALL : kind == INFINITE ? NUMBERS : FINITE;
    uint32_t bits = special[below(t, (size_t)known)];
    float x = check_float(&t->random);
    if (kind == ORDINARY)
        return x * 4;
    if (below(t, 4) > 0)
        return ldexpf(x, (int)below(t, 60) - 30);
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float *floats(test *t, size_t n, int kind) {
    float *x = buffer(t, n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = random_float(t, kind);
    return x;
}

/* In [-range / 2, range / 2). */
static int32_t *integers(test *t, size_t n, uint32_t range) {
    int32_t *x = buffer(t, n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (int32_t)below(t, range) - (int32_t)(range / 2);
    return x;
}

static uint16_t *halves(test *t, size_t n, int kind) {
    uint16_t *x = buffer(t, n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        const float value = random_float(t, kind);
        t->scalar->bytes.f32_to_f16(&x[i], &value, 1);
        if (kind >= INFINITE && below(t, 64) == 0)
            x[i] = (uint16_t)(below(t, 2) << 15 | 0x7c00);
        if (kind == ANYTHING && below(t, 64) == 0)
            x[i] = (uint16_t)check_random(&t->random);
    }
    return x;
}

/* Makes all NaN the same: which NaN results from two is up to the instruction, but the result must
 * be NaN. */
static void one_nan(float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (isnan(x[i]))
            x[i] = NAN;
}

static void same_bytes(test *t, const void *found, const void *expected, size_t bytes,
                       const char *what) {
    const uint8_t *a = found, *b = expected;
    for (size_t i = 0; i < bytes; i++)
        CHECK_MSG(a[i] == b[i],
                  "%s of %s: byte %zu of %zu is %02x, expected %02x (--seed %" PRIu64 ")", what,
                  t->tier->isa, i, bytes, a[i], b[i], t->seed);
}

static void same_floats(test *t, float *found, float *expected, size_t n, const char *what) {
    one_nan(found, n);
    one_nan(expected, n);
    for (size_t i = 0; i < n; i++)
        CHECK_MSG(memcmp(&found[i], &expected[i], sizeof *found) == 0,
                  "%s of %s: value %zu of %zu is %a, expected %a (--seed %" PRIu64 ")", what,
                  t->tier->isa, i, n, (double)found[i], (double)expected[i], t->seed);
}

static void done(test *t, const char *what) {
    guard_release(&t->guard, what);
}

#endif
