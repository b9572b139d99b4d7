/* SPDX-License-Identifier: MIT
 *
 * vnni.h: the matrix products of the two tiers with vpdpbusd, which adds four products of
 * unsigned and signed bytes to a 32-bit lane: four columns of one row.
 *
 * Defined before including: what matmul.h wants, and sums_dot (the instruction).
 */
#define INT8_FLIP 0
#include "matmul.h"

/* One register of a ternary tile. Fields are masked, never shifted: field f counts 4^f times, in
 * a sum of its own. */
INLINE void ternary_fields(sums sum[4], const uint8_t *tile, const int8_t *q) {
    bytes codes = bytes_load(tile);
    UNROLL
    for (int f = 0; f < 4; f++)
        sum[f] =
            sums_dot(sum[f], bytes_and(codes, bytes_fill(3 << 2 * f)), bytes_spread(q + 4 * f));
}

INLINE sums ternary_total(const sums sum[4]) {
    return sums_add(sums_add(sum[0], sums_shr(sum[1], 2)),
                    sums_add(sums_shr(sum[2], 4), sums_shr(sum[3], 6)));
}

INLINE void int8_columns(sums sum[2], const uint8_t *high, const uint8_t *low, const int8_t *q) {
    bytes u[2];
    int8_bytes(u, high, low);
    sum[0] = sums_dot(sum[0], u[0], bytes_spread(q));
    sum[1] = sums_dot(sum[1], u[1], bytes_spread(q + 4));
}

INLINE sums no_fold(sums sum) {
    return sum;
}

static void ternary_vector(const bn_matmul *m);
static void int8_vector(const bn_matmul *m);

static void ternary_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        ternary_vector(m);
    else
        multiply(m, BN_TERNARY_TILE_K, unpack_ternary, sums_dot, no_fold, 6);
}

static void int8_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        int8_vector(m);
    else
        multiply(m, BN_INT8_TILE_K, unpack_int8, sums_dot, no_fold, 6);
}

static uint64_t int8_peak(uint64_t rounds, int32_t *sink) {
    return peak(rounds, sink, sums_dot);
}
