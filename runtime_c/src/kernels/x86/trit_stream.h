/* SPDX-License-Identifier: MIT
 *
 * trit_stream.h: products of weights stored as five trits per byte with vpdpbusd: one linear stream
 * for up to `most` tokens per pass.
 */
#ifndef BITNET_X86_TRIT_STREAM_H
#define BITNET_X86_TRIT_STREAM_H

#include "integer.h"
#include "trits.h"

typedef uint32_t wraps __attribute__((vector_size(sizeof(sums))));

INLINE bytes three_times(bytes v) {
    return (bytes)((octets)v + (octets)v + (octets)v);
}

/* (3a - b) / 256, modulo 2^32 before the division */
INLINE sums trit_total(sums a, sums b) {
    return sums_shr((sums)(3 * (wraps)a - (wraps)b), 8);
}

/* One register of rows, T tokens, without decoding: byte v is multiplied by the activations of its
 * first column, 3v by those of the second, and so on. 256 times a code is 3v minus the next v
 * (FORMAT.md §4), so two sums give the product. Each is split into `parts` partial sums to hide
 * latency. */
INLINE void residue_stream(int32_t *acc, size_t acc_stride, const uint8_t *tile, size_t tiles,
                           const int8_t *q, size_t q_stride, dot_fn *dot, const int T,
                           const int parts) {
    sums a[6][5], b[6][5];
#define CLEAR(t)                                                                                   \
    a[t][0] = a[t][1] = a[t][2] = a[t][3] = a[t][4] = sums_zero();                                 \
    b[t][0] = b[t][1] = b[t][2] = b[t][3] = b[t][4] = sums_zero();
    EACH_TOKEN(CLEAR)
#undef CLEAR
    for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TRIT_TILE_K) {
        prefetch(tile);
        bytes v = bytes_load(tile), next;
#define DOT(t, f)                                                                                  \
    if (t < T) {                                                                                   \
        const bytes x = bytes_spread(q + t * q_stride + 4 * f);                                    \
        a[t][f % parts] = dot(a[t][f % parts], v, x);                                              \
        b[t][f % parts] = dot(b[t][f % parts], next, x);                                           \
    }
#define FIELD(f)                                                                                   \
    next = three_times(v);                                                                         \
    EACH_TOKEN_AND(DOT, f)                                                                         \
    v = next;
        FIELD(0)
        FIELD(1)
        FIELD(2)
        FIELD(3)
        FIELD(4)
#undef FIELD
#undef DOT
    }
#define PUT(t)                                                                                     \
    if (t < T)                                                                                     \
        sums_store(acc + t * acc_stride,                                                           \
                   trit_total(a[t][0] + a[t][1] + a[t][2] + a[t][3] + a[t][4],                     \
                              b[t][0] + b[t][1] + b[t][2] + b[t][3] + b[t][4]));
    EACH_TOKEN(PUT)
#undef PUT
}

/* 64 times the code of each byte v, 64·floor(3v / 256). Both averages round up; subtracting 1 first
 * compensates. */
INLINE bytes trit_field(bytes v) {
    const bytes less = bytes_less(v, bytes_fill(1));
    const bytes half = bytes_average(less, bytes_fill(0));
    return bytes_and(bytes_average(less, half), bytes_fill(0xC0));
}

enum { CODES_MOST = 12 }; /* tokens whose sums and shared operands fit 32 registers */
#define EACH_CODED(X) EACH_TOKEN(X) X(6) X(7) X(8) X(9) X(10) X(11)
#define EACH_CODED_AND(X, n) EACH_TOKEN_AND(X, n) X(6, n) X(7, n) X(8, n) X(9, n) X(10, n) X(11, n)

/* The same with decoded codes: more work per byte, half as much per token. A token has `parts`
 * partial sums, two if there are registers for them. */
INLINE void code_stream(int32_t *acc, size_t acc_stride, const uint8_t *tile, size_t tiles,
                        const int8_t *q, size_t q_stride, dot_fn *dot, const int T,
                        const int parts) {
    sums sum[CODES_MOST][2];
#define CLEAR(t) sum[t][0] = sum[t][1] = sums_zero();
    EACH_CODED(CLEAR)
#undef CLEAR
    for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TRIT_TILE_K) {
        prefetch(tile);
        bytes v = bytes_load(tile);
#define DOT(t, f)                                                                                  \
    if (t < T)                                                                                     \
        sum[t][f % parts] = dot(sum[t][f % parts], field, bytes_spread(q + t * q_stride + 4 * f));
#define FIELD(f)                                                                                   \
    {                                                                                              \
        const bytes field = trit_field(v);                                                         \
        EACH_CODED_AND(DOT, f)                                                                     \
        v = three_times(v);                                                                        \
    }
        FIELD(0)
        FIELD(1)
        FIELD(2)
        FIELD(3)
        FIELD(4)
#undef FIELD
#undef DOT
    }
#define PUT(t)                                                                                     \
    if (t < T)                                                                                     \
        sums_store(acc + t * acc_stride, sums_shr(sum[t][0] + sum[t][1], 6));
    EACH_CODED(PUT)
#undef PUT
}

/* Tokens in blocks of nearly equal size. */
INLINE void trit_few(const bn_matmul *m, dot_fn *dot, const int most) {
    const size_t blocks = (m->tokens + (size_t)most - 1) / (size_t)most;
    for (size_t p = 0; p < m->panels; p++)
        for (size_t row = 0; row < BN_PANEL; row += VEC_ROWS)
            for (size_t b = 0; b < blocks; b++) {
                const size_t t = m->tokens * b / blocks;
                const uint8_t *tile = m->tiles + p * m->panel_stride + 4 * row;
                int32_t *acc = m->acc + t * m->acc_stride + p * BN_PANEL + row;
                const int8_t *q = m->q + t * m->q_stride;
#define RESIDUES(T, parts)                                                                         \
    case T:                                                                                        \
        residue_stream(acc, m->acc_stride, tile, m->k_tiles, q, m->q_stride, dot, T, parts);       \
        break
#define CODES(T)                                                                                   \
    case T:                                                                                        \
        if (T <= most)                                                                             \
            code_stream(acc, m->acc_stride, tile, m->k_tiles, q, m->q_stride, dot, T,              \
                        T <= 2 + REGISTERS / 8 ? 2 : 1);                                           \
        break
                switch (m->tokens * (b + 1) / blocks - t) {
                    RESIDUES(1, 5);
                    RESIDUES(2, 2);
                    CODES(3);
                    CODES(4);
                    CODES(5);
                    CODES(6);
                    CODES(7);
                    CODES(8);
                    CODES(9);
                    CODES(10);
                    CODES(11);
                    CODES(12);
                }
#undef RESIDUES
#undef CODES
            }
}

#endif
