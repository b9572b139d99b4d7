/* SPDX-License-Identifier: MIT
 *
 * check.h: a minimal test harness. A failed check prints where and what failed and exits with 1; a
 * program that reaches the end of main returns 0.
 */
#ifndef BITNET_CHECK_H
#define BITNET_CHECK_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_feature)
#define CHECK_FEATURE(x) __has_feature(x)
#else
#define CHECK_FEATURE(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) ||                               \
    CHECK_FEATURE(address_sanitizer) || CHECK_FEATURE(thread_sanitizer)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* Check a condition; the second form adds a printf format and the relevant values. */
#define CHECK(condition) CHECK_MSG(condition, "%s", "")
#define CHECK_MSG(condition, ...)                                                                  \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s  ", __FILE__, __LINE__, #condition);                \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Check that two integers are equal; prints both on failure. */
#define CHECK_EQ(found, expected)                                                                  \
    do {                                                                                           \
        const int64_t check_found = (int64_t)(found), check_expected = (int64_t)(expected);        \
        CHECK_MSG(check_found == check_expected, "%s is %" PRId64 ", expected %" PRId64, #found,   \
                  check_found, check_expected);                                                    \
    } while (0)

/* A random number generator that gives the same numbers everywhere (splitmix64). */
static inline uint64_t check_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [0, n), n >= 1. */
static inline size_t check_below(uint64_t *state, size_t n) {
    return (size_t)(check_random(state) % n);
}

/* Uniform in [-1, 1). */
static inline float check_float(uint64_t *state) {
    return (float)((int32_t)(check_random(state) >> 40) - (1 << 23)) / (float)(1 << 23);
}

#endif
