/* SPDX-License-Identifier: MIT
 *
 * trits_template.h: decoding of weights stored as five trits per byte. With many tokens, a stretch
 * of a panel is repacked into TERNARY_2BIT tiles in the cache once, and the tier's ternary_matmul
 * multiplies all tokens with it.
 *
 * Written with the compiler's vector extensions, so that each tier's flags select the instructions.
 *
 * Parameters:
 *   TRIT_BYTES                             bytes of a vector register
 *   TRITS_ADD_WHERE(sum, s, least, power)  sum, plus power where s >= least; sum and s are
 *                                          registers. Optional
 */
#ifndef TRIT_BYTES
#error "a parameter is missing"
#endif

#include <string.h>

#include "inline.h"
#include "kernels.h"

typedef uint8_t octets __attribute__((vector_size(TRIT_BYTES)));
typedef int8_t trits __attribute__((vector_size(TRIT_BYTES))); /* v_f - 128 of FORMAT.md §4 */

/* Least v - 128 that means code 1 and code 2: thirds of 256, rounded up. */
enum { TRIT_1 = 86 - 128, TRIT_2 = 171 - 128 };

INLINE trits trits_load(const uint8_t *p) {
    octets v;
    memcpy(&v, p, sizeof v);
    return (trits)(v ^ 0x80);
}

/* 3v - 128 = 3(v - 128), modulo 256 */
INLINE trits trits_next(trits s) {
    return (trits)((octets)s + (octets)s + (octets)s);
}

/* sum + codes · power, a power of 2. */
INLINE octets trits_add_codes(octets sum, trits s, int power) {
#ifdef TRITS_ADD_WHERE
    return TRITS_ADD_WHERE(TRITS_ADD_WHERE(sum, s, TRIT_1, power), s, TRIT_2, power);
#else
    const octets a = (octets)(s >= TRIT_1), b = (octets)(s >= TRIT_2); /* true is -1 */
    const octets times = (octets){0} + (uint8_t)power;
    return power == 1 ? sum - a - b : sum + (a & times) + (b & times);
#endif
}

/* Four tiles of 20 columns make five of 16: in both, a byte covers one row and one column of each
 * group of four columns, with five groups to a byte or four. */
INLINE void trits_repack_four(uint8_t *to, const uint8_t *from) {
    for (size_t part = 0; part < BN_TILE_BYTES; part += TRIT_BYTES) {
        octets tile = {0};
        UNROLL
        for (size_t i = 0; i < 4; i++) {
            trits s = trits_load(from + i * BN_TILE_BYTES + part);
            UNROLL
            for (size_t group = 5 * i; group < 5 * i + 5; group++, s = trits_next(s)) {
                tile = trits_add_codes(tile, s, 1 << group % 4 * 2);
                if (group % 4 == 3) {
                    memcpy(to + group / 4 * BN_TILE_BYTES + part, &tile, sizeof tile);
                    tile = (octets){0};
                }
            }
        }
    }
}

static void trits_repack(uint8_t *to, const uint8_t *from, size_t tiles) {
    enum { AHEAD = 4096 }; /* prefetch distance in bytes */
    for (; tiles >= 4; tiles -= 4, to += 5 * BN_TILE_BYTES, from += 4 * BN_TILE_BYTES) {
        for (size_t i = 0; i < 4; i++)
            __builtin_prefetch(from + AHEAD + i * BN_TILE_BYTES);
        trits_repack_four(to, from);
    }
    if (tiles > 0) { /* padding past the last column: any code will do, as q is 0 there */
        uint8_t last[4 * BN_TILE_BYTES] = {0};
        memcpy(last, from, tiles * BN_TILE_BYTES);
        trits_repack_four(to, last);
    }
}

/* trit_matmul for many tokens. If a row has more than one stretch, the sums of the later ones are
 * added to acc, TOKENS tokens at a time. */
INLINE void trits_many(const bn_matmul *m, void (*ternary_matmul)(const bn_matmul *)) {
    enum { PANELS = 4, TILES = 128, TOKENS = 60 }; /* 2,560 columns, a multiple of BN_Q_ALIGN */
    enum { STRIDE = TILES / 4 * 5 * BN_TILE_BYTES };
    _Alignas(64) uint8_t tiles[PANELS * STRIDE];
    int32_t more[TOKENS * PANELS * BN_PANEL];
    for (size_t p = 0; p < m->panels; p += PANELS)
        for (size_t first = 0; first < m->k_tiles; first += TILES) {
            const size_t left = m->k_tiles - first, n = left < TILES ? left : TILES;
            const size_t panels = m->panels - p < PANELS ? m->panels - p : PANELS;
            const uint8_t *from = m->tiles + p * m->panel_stride + first * BN_TILE_BYTES;
            for (size_t i = 0; i < panels; i++)
                trits_repack(tiles + i * STRIDE, from + i * m->panel_stride, n);
            for (size_t t = 0, tokens; t < m->tokens; t += tokens) {
                int32_t *acc = m->acc + t * m->acc_stride + p * BN_PANEL;
                tokens = first == 0 || m->tokens - t < TOKENS ? m->tokens - t : TOKENS;
                ternary_matmul(
                    &(bn_matmul){.acc = first == 0 ? acc : more,
                                 .acc_stride = first == 0 ? m->acc_stride : panels * BN_PANEL,
                                 .tiles = tiles,
                                 .panel_stride = STRIDE,
                                 .panels = panels,
                                 .k_tiles = (5 * n + 3) / 4,
                                 .q = m->q + t * m->q_stride + first * BN_TRIT_TILE_K,
                                 .q_stride = m->q_stride,
                                 .tokens = tokens});
                for (size_t i = 0; first > 0 && i < tokens; i++)
                    for (size_t row = 0; row < panels * BN_PANEL; row++)
                        acc[i * m->acc_stride + row] += more[i * panels * BN_PANEL + row];
            }
        }
}

#undef TRIT_BYTES
#undef TRITS_ADD_WHERE
