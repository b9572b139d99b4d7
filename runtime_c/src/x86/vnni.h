/* SPDX-License-Identifier: MIT
 *
 * vnni.h: the matrix products of the two tiers with vpdpbusd, which adds four products of
 * unsigned and signed bytes to a 32-bit lane: four columns of one row.
 *
 * Defined before including: what matmul.h wants, sums_dot (the instruction), sums_shr, and for
 * bytes _fill, _and, _select (mask ? a : b), _shl and _shr (of 16 bits: neighbours get in).
 */
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

/* One register of the two planes to bytes: columns 0-3 and columns 4-7. */
INLINE void int8_bytes(bytes u[2], const uint8_t *high, const uint8_t *low) {
    bytes h = bytes_load(high), l = bytes_load(low), top = bytes_fill(0xf0);
    u[0] = bytes_select(top, bytes_shl(h, 4), l);
    u[1] = bytes_select(top, h, bytes_shr(l, 4));
}

INLINE void int8_columns(sums sum[2], const uint8_t *high, const uint8_t *low, const int8_t *q) {
    bytes u[2];
    int8_bytes(u, high, low);
    sum[0] = sums_dot(sum[0], u[0], bytes_spread(q));
    sum[1] = sums_dot(sum[1], u[1], bytes_spread(q + 4));
}

INLINE void unpack_ternary(uint8_t *w, const bn_matmul *m, size_t offset, size_t tiles) {
    const bytes three = bytes_fill(3);
    for (size_t i = 0; i < tiles; i++)
        for (size_t half = 0; half < BN_TILE_BYTES; half += sizeof(bytes)) {
            bytes codes = bytes_load(m->tiles + offset + i * BN_TILE_BYTES + half);
            uint8_t *to = w + 4 * i * GROUP_BYTES + half;
            bytes_store(to, bytes_and(codes, three));
            bytes_store(to + GROUP_BYTES, bytes_and(bytes_shr(codes, 2), three));
            bytes_store(to + 2 * GROUP_BYTES, bytes_and(bytes_shr(codes, 4), three));
            bytes_store(to + 3 * GROUP_BYTES, bytes_and(bytes_shr(codes, 6), three));
        }
}

INLINE void unpack_int8(uint8_t *w, const bn_matmul *m, size_t offset, size_t tiles) {
    for (size_t i = 0; i < tiles; i++)
        for (size_t half = 0; half < BN_TILE_BYTES; half += sizeof(bytes)) {
            bytes u[2];
            size_t at = offset + i * BN_TILE_BYTES + half;
            int8_bytes(u, m->tiles + at, m->low + at);
            bytes_store(w + 2 * i * GROUP_BYTES + half, u[0]);
            bytes_store(w + (2 * i + 1) * GROUP_BYTES + half, u[1]);
        }
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
    enum { CHAINS = 12 };
    sums sum[CHAINS];
    bytes w = bytes_fill(1), q = bytes_fill(2);
    UNROLL
    for (int i = 0; i < CHAINS; i++)
        sum[i] = sums_zero();
    for (uint64_t n = 0; n < rounds; n++) {
        UNROLL
        for (int i = 0; i < CHAINS; i++) {
            sum[i] = sums_dot(sum[i], w, q);
            KEEP(sum[i]);
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
