/* SPDX-License-Identifier: MIT
 *
 * floats.h: the floating-point environment in which all results are defined: every operation rounds
 * to nearest and to its own type, subnormal numbers are kept, and exceptions do not trap. A
 * caller's thread may have a different one (fesetround, flush-to-zero as -Ofast sets it), so calls
 * that compute replace it and restore it afterwards, and workers start with this one.
 */
#ifndef BITNET_FLOATS_H
#define BITNET_FLOATS_H

#include <float.h>
#include <stdint.h>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) ||           \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#error "-ffast-math, -Ofast or a part of them changes results and drops NaN; compile without"
#endif
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "floats must be computed as floats; on x86 of 32 bits compile with -msse2 -mfpmath=sse"
#endif

/* The caller's environment: control and status, so that the caller does not see our exception
 * flags. */
#if defined(__x86_64__) || defined(__SSE2_MATH__)

typedef uint32_t bn_floats;

static inline void bn_floats_set(const bn_floats *mxcsr) {
    __asm__ volatile("ldmxcsr %0" : : "m"(*mxcsr) : "memory");
}

static inline bn_floats bn_floats_standard(void) {
    const bn_floats standard = 0x1F80; /* all exceptions masked, nothing else */
    bn_floats before;
    __asm__ volatile("stmxcsr %0" : "=m"(before));
    bn_floats_set(&standard);
    return before;
}

#elif defined(__aarch64__)

typedef struct bn_floats {
    uint64_t control, status;
} bn_floats;

static inline void bn_floats_set(const bn_floats *f) {
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(f->control), "r"(f->status) : "memory");
}

static inline bn_floats bn_floats_standard(void) {
    const bn_floats standard = {0, 0};
    bn_floats before;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(before.control), "=r"(before.status));
    bn_floats_set(&standard);
    return before;
}

#else

#include <fenv.h>

typedef fenv_t bn_floats;

static inline void bn_floats_set(const bn_floats *f) {
    fesetenv(f);
}

static inline bn_floats bn_floats_standard(void) {
    bn_floats before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}

#endif

/* Standard environment from here to the end of the block, where the caller's is restored. */
#define BN_STANDARD_FLOATS                                                                         \
    __attribute__((cleanup(bn_floats_set), unused)) const bn_floats bn_floats_before =             \
        bn_floats_standard()

#endif
