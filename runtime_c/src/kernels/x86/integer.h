/* SPDX-License-Identifier: MIT
 *
 * integer.h: shared by all integer products on x86. The dot product of a tier is passed as an
 * argument and inlined to one or a few instructions.
 */
#ifndef BITNET_X86_INTEGER_H
#define BITNET_X86_INTEGER_H

#include "register.h"

/* X(t), or X(t, n), for each token t of a block. Compilers unroll loops only after deciding what
 * lives in registers, and would keep the sums in memory. */
#define EACH_TOKEN(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define EACH_TOKEN_AND(X, n) X(0, n) X(1, n) X(2, n) X(3, n) X(4, n) X(5, n)

/* Switches on the tokens of a block, 2 to 6: BLOCK(T) is the case of T tokens, with T a
 * constant. */
#define BY_TOKENS(tokens, BLOCK)                                                                   \
    switch (tokens) {                                                                              \
        BLOCK(2);                                                                                  \
        BLOCK(3);                                                                                  \
        BLOCK(4);                                                                                  \
        BLOCK(5);                                                                                  \
        BLOCK(6);                                                                                  \
    }

enum { TILE_VECS = BN_TILE_BYTES / sizeof(bytes) };
/* Prefetch distances of a weight stream, in bytes: FAR from memory, some 200 ns of it, then NEAR
 * from L2. Intel's L1 allows few outstanding lines, so lines are fetched from memory into L2
 * (Emerald Rapids, a token of 2B4T, one thread: 48.4 ms into L1, 45.4 into L2; 43.5 with both,
 * while memory allows 39). On AMD one prefetch straight into L1 is best (Zen 4: 22.7, 25.4 and 25.3
 * ms). */
enum { FAR = 8192, NEAR = 2048 };

INLINE void prefetch_from_memory(const void *p) {
    if (bn_like_intel)
        _mm_prefetch((const char *)p, _MM_HINT_T1);
    else
        _mm_prefetch((const char *)p, _MM_HINT_T0);
}

INLINE void prefetch_from_second_cache(const void *p) {
    if (bn_like_intel)
        _mm_prefetch((const char *)p, _MM_HINT_T0);
}

INLINE void prefetch(const uint8_t *p) {
    prefetch_from_memory(p + FAR);
    prefetch_from_second_cache(p + NEAR);
}

/* For several panels at a time, which lie far apart: prefetching all of them far ahead would fill
 * L1, so lines go to L2 first, and from there to L1 shortly before use. (Zen 4, 2 tokens, where one
 * token reads 23 to 26 GB/s: 12 to 18 straight into L1, 22 to 24 with this.) */
INLINE void prefetch_twice(const uint8_t *far, const uint8_t *tile) {
    enum { SOON = 1024 };
    _mm_prefetch((const char *)far, _MM_HINT_T1);
    _mm_prefetch((const char *)tile + SOON, _MM_HINT_T0);
}

typedef sums dot_fn(sums sum, bytes w, bytes q);

/* sum plus the four fields of ternary codes, each times its own activations. */
INLINE sums fields_dot(sums sum, bytes codes, const bytes x[4], dot_fn *dot) {
    const bytes three = bytes_fill(3);
    sum = dot(sum, bytes_and(codes, three), x[0]);
    sum = dot(sum, bytes_and(bytes_shr(codes, 2), three), x[1]);
    sum = dot(sum, bytes_and(bytes_shr(codes, 4), three), x[2]);
    return dot(sum, bytes_and(bytes_shr(codes, 6), three), x[3]);
}

/* Independent dot products on registers only. The empty asm hides from the compiler that all of
 * them are the same. */
INLINE uint64_t peak(uint64_t rounds, int32_t *sink, dot_fn *dot) {
    enum { CHAINS = 12 };
    sums sum[CHAINS];
    bytes w = bytes_fill(1), q = bytes_fill(2);
    UNROLL
    for (int i = 0; i < CHAINS; i++)
        sum[i] = sums_zero();
    for (uint64_t n = 0; n < rounds; n++) {
        UNROLL
        for (int i = 0; i < CHAINS; i++) {
            sum[i] = dot(sum[i], w, q);
            __asm__ volatile("" : "+v"(sum[i]), "+v"(w));
        }
    }
    int32_t lanes[VEC_ROWS];
    UNROLL
    for (int i = 1; i < CHAINS; i++)
        sum[0] = sums_add(sum[0], sum[i]);
    sums_store(lanes, sum[0]);
    *sink = lanes[0];
    return rounds * CHAINS * sizeof(bytes);
}

#endif
