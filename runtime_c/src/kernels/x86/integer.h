/* SPDX-License-Identifier: MIT
 *
 * integer.h: what all integer products of x86 share. The dot product of a tier is an argument:
 * inlined, it is an instruction or a few.
 */
#ifndef BITNET_X86_INTEGER_H
#define BITNET_X86_INTEGER_H

#include "register.h"

/* X for each token of a block, or for each with a second number. Loops would do, but compilers
 * that unroll them do so after deciding what lives in registers, and keep the sums in memory. */
#define EACH_TOKEN(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define EACH_TOKEN_AND(X, n) X(0, n) X(1, n) X(2, n) X(3, n) X(4, n) X(5, n)

/* BLOCK(T) for the block of T tokens, 2 to 6: a case of a switch, in which T is a constant. */
#define BY_TOKENS(tokens, BLOCK)                                                                   \
    switch (tokens) {                                                                              \
        BLOCK(2);                                                                                  \
        BLOCK(3);                                                                                  \
        BLOCK(4);                                                                                  \
        BLOCK(5);                                                                                  \
        BLOCK(6);                                                                                  \
    }

enum { TILE_VECS = BN_TILE_BYTES / sizeof(bytes) };
/* How many bytes ahead a stream of weights is asked for: of memory, some 200 ns of it, and then of
 * the second cache. Intel's first cache has room for few lines that are on their way, so memory is
 * asked for the second (Emerald Rapids, a token of 2B4T, one thread: 48.4 ms for the first, 45.4
 * for the second; 43.5 with both, of 39 that memory allows). AMD's is best asked for once, at once
 * (Zen 4: 22.7, 25.4 and 25.3 ms). */
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

/* Of several panels at a time, which lie far apart: what is far ahead would fill the first cache,
 * so it goes to the second, and from there soon before its turn. (Zen 4, 2 tokens, memory that
 * gives one token 23 to 26 GB/s: 12 to 18 for the first cache at once, 22 to 24 with this.) */
INLINE void prefetch_twice(const uint8_t *far, const uint8_t *tile) {
    enum { SOON = 1024 };
    _mm_prefetch((const char *)far, _MM_HINT_T1);
    _mm_prefetch((const char *)tile + SOON, _MM_HINT_T0);
}

typedef sums dot_fn(sums sum, bytes w, bytes q);

/* sum and the four fields of ternary codes, each times activations of its own. */
INLINE sums fields_dot(sums sum, bytes codes, const bytes x[4], dot_fn *dot) {
    const bytes three = bytes_fill(3);
    sum = dot(sum, bytes_and(codes, three), x[0]);
    sum = dot(sum, bytes_and(bytes_shr(codes, 2), three), x[1]);
    sum = dot(sum, bytes_and(bytes_shr(codes, 4), three), x[2]);
    return dot(sum, bytes_and(bytes_shr(codes, 6), three), x[3]);
}

/* Independent dot products on registers alone. The empty asm hides from the compiler that every
 * one is the same. */
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
