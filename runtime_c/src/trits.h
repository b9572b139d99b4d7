/* SPDX-License-Identifier: MIT
 *
 * trits.h: products of many tokens with weights of five trits a byte, for every tier: a stretch
 * of a panel becomes tiles of TERNARY_2BIT in the cache, once for all tokens, and the tier's
 * ternary_matmul does the rest.
 *
 * Written with the compiler's vectors, so that each tier's flags make of it what they can.
 * Defined before including: TRIT_BYTES, the size of its registers.
 */
#ifndef BITNET_TRITS_H
#define BITNET_TRITS_H

#include <string.h>

#include "kernels.h"

typedef int8_t trits __attribute__((vector_size(TRIT_BYTES)));
typedef uint8_t trits_unsigned __attribute__((vector_size(TRIT_BYTES)));

enum {
    STRETCH_TRIT_TILES = 384,                        /* 7,680 columns, a multiple of 4 tiles */
    STRETCH_TILES_2BIT = STRETCH_TRIT_TILES * 5 / 4, /* 30 KiB */
    STRETCH_COLUMNS = STRETCH_TRIT_TILES * BN_TRIT_TILE_K, /* a multiple of BN_Q_ALIGN */
    TOKENS_AT_ONCE = 64                                    /* when there is more than one stretch */
};

#define TRITS_INLINE static inline __attribute__((always_inline))

/* v - 128 as signed bytes: then the next v is 3 times this one, and the code counts how many of
 * 86 and 171 (thirds of 256, rounded up) are not above v. */
TRITS_INLINE trits trits_load(const uint8_t *p) {
    trits_unsigned v;
    memcpy(&v, p, sizeof v);
    return (trits)(v ^ 0x80);
}

TRITS_INLINE trits trits_next(trits s) {
    const trits_unsigned v = (trits_unsigned)s;
    return (trits)(v + v + v);
}

/* The code, times a power of 2. */
TRITS_INLINE trits_unsigned trits_code(trits s, int power) {
    const trits_unsigned one = (trits_unsigned){0} + (uint8_t)power;
    return ((trits_unsigned)(s >= 86 - 128) & one) + ((trits_unsigned)(s >= 171 - 128) & one);
}

/* Four tiles of 20 columns are five of 16: each is 20 groups of four columns, and a group is five
 * fields of one or four of the other. */
TRITS_INLINE void trits_to_2bit(uint8_t *to, const uint8_t *from, size_t tiles) {
    for (size_t part = 0; part < BN_TILE_BYTES; part += TRIT_BYTES) {
        trits_unsigned tile = {0};
#define FIELD(i, f)                                                                                \
    tile |= trits_code(s, 1 << (5 * i + f) % 4 * 2);                                               \
    s = trits_next(s);                                                                             \
    if ((5 * i + f) % 4 == 3) {                                                                    \
        memcpy(to + (5 * i + f) / 4 * BN_TILE_BYTES + part, &tile, sizeof tile);                   \
        tile = (trits_unsigned){0};                                                                \
    }
#define TILE(i)                                                                                    \
    if (i < tiles) {                                                                               \
        trits s = trits_load(from + i * BN_TILE_BYTES + part);                                     \
        FIELD(i, 0) FIELD(i, 1) FIELD(i, 2) FIELD(i, 3) FIELD(i, 4)                                \
    }
        TILE(0)
        TILE(1) TILE(2) TILE(3)
#undef FIELD
#undef TILE
            if (tiles < 4) /* fields left over count 0 */
            memcpy(to + 5 * tiles / 4 * BN_TILE_BYTES + part, &tile, sizeof tile);
    }
}

static void trits_repack(uint8_t *to, const uint8_t *from, size_t tiles) {
    for (; tiles >= 4; tiles -= 4, to += 5 * BN_TILE_BYTES, from += 4 * BN_TILE_BYTES)
        trits_to_2bit(to, from, 4);
    if (tiles > 0)
        trits_to_2bit(to, from, tiles);
}

/* Stretch `first` of panel p, tokens [t, t + n): into acc, or added to it. */
TRITS_INLINE void trits_add(const bn_matmul *m, const uint8_t *tiles, size_t p, size_t first,
                            size_t k_tiles, size_t t, size_t n, void (*matmul)(const bn_matmul *)) {
    int32_t part[TOKENS_AT_ONCE * BN_PANEL];
    int32_t *acc = m->acc + t * m->acc_stride + p * BN_PANEL;
    const bn_matmul two = {.acc = first ? part : acc,
                           .acc_stride = first ? BN_PANEL : m->acc_stride,
                           .tiles = tiles,
                           .panel_stride = k_tiles * BN_TILE_BYTES,
                           .panels = 1,
                           .k_tiles = k_tiles,
                           .q = m->q + t * m->q_stride + first * BN_TRIT_TILE_K,
                           .q_stride = m->q_stride,
                           .tokens = n};
    matmul(&two);
    for (size_t i = 0; first && i < n; i++)
        for (size_t row = 0; row < BN_PANEL; row++)
            acc[i * m->acc_stride + row] += part[i * BN_PANEL + row];
}

TRITS_INLINE void trits_many(const bn_matmul *m, void (*ternary_matmul)(const bn_matmul *)) {
    _Alignas(64) uint8_t tiles[STRETCH_TILES_2BIT * BN_TILE_BYTES];
    const size_t most = m->k_tiles > STRETCH_TRIT_TILES ? TOKENS_AT_ONCE : m->tokens;
    for (size_t p = 0; p < m->panels; p++)
        for (size_t t = 0; t < m->tokens; t += most)
            for (size_t first = 0; first < m->k_tiles; first += STRETCH_TRIT_TILES) {
                const size_t left = m->k_tiles - first;
                const size_t n = left < STRETCH_TRIT_TILES ? left : STRETCH_TRIT_TILES;
                const size_t tokens = m->tokens - t < most ? m->tokens - t : most;
                trits_repack(tiles, m->tiles + p * m->panel_stride + first * BN_TILE_BYTES, n);
                trits_add(m, tiles, p, first, (5 * n + 3) / 4, t, tokens, ternary_matmul);
            }
}

#endif
