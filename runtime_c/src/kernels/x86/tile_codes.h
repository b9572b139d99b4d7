/* SPDX-License-Identifier: MIT
 *
 * tile_codes.h: ternary codes as tiles of AMX, and their products with tiles of tokens.
 *
 * What an instruction wants of weights, four columns of 16 rows side by side, is what a field of a
 * weight tile is (FORMAT.md §4). So four weight tiles, unpacked to a byte a code, are one of its
 * tiles, and activations are taken as they lie.
 */
#ifndef BITNET_X86_TILE_CODES_H
#define BITNET_X86_TILE_CODES_H

#include "integer.h"
#include "tiles.h"

enum {
    STEP_TILES = 4,                          /* weight tiles that make a tile */
    STEP_K = STEP_TILES * BN_TERNARY_TILE_K, /* columns of it */
    PAIR = 2,                                /* panels, and tiles of tokens, of a block */
    PART_STEPS = 10,                         /* unpacked at a time: 20 kB */
    EARLY = 3,                               /* steps that are unpacked before they are loaded */
    CODES_SIZE = PART_STEPS * PAIR * TILE_SIZE
};

/* Some columns of one or two panels: of ternary codes, or of 16 rows of int8 each. */
typedef struct code_part {
    const uint8_t *panel;       /* the first */
    size_t stride;              /* to the second */
    size_t k_tiles;             /* weight tiles of a panel, or as many columns of int8 */
    size_t row_bytes;           /* of int8; 0: ternary codes */
    size_t first_step, n_steps; /* tiles of codes that they make, of all of a panel */
    uint8_t *codes;             /* [step][panel][TILE_SIZE] */
} code_part;

enum { SHARE = BN_SCALE_GROUP_K / STEP_K }; /* steps of a scale, which are in one part */

INLINE size_t shares_of(size_t k_tiles) {
    return (k_tiles + BN_GROUP_TILES - 1) / BN_GROUP_TILES;
}

INLINE size_t parts_of(size_t k_tiles) {
    return (shares_of(k_tiles) + PART_STEPS / SHARE - 1) / (PART_STEPS / SHARE);
}

INLINE code_part part_of(const uint8_t *panel, size_t stride, size_t k_tiles, size_t row_bytes,
                         size_t i, uint8_t *codes) {
    const size_t shares = shares_of(k_tiles), parts = parts_of(k_tiles);
    const size_t first = SHARE * (shares * i / parts), most = SHARE * (shares * (i + 1) / parts);
    const size_t last = bn_min(most, (k_tiles + STEP_TILES - 1) / STEP_TILES);
    return (code_part){.panel = panel,
                       .stride = stride,
                       .k_tiles = k_tiles,
                       .row_bytes = row_bytes,
                       .first_step = first,
                       .n_steps = last - first,
                       .codes = codes};
}

/* A tile of codes from four weight tiles, or from what is left of them, and zeros. ahead: what is
 * needed later, as much. */
INLINE void unpack_tiles(uint8_t *codes, const uint8_t *tiles, const uint8_t *ahead, size_t n) {
    const bytes three = bytes_fill(3);
    UNROLL
    for (size_t i = 0; i < STEP_TILES; i++, codes += 4 * sizeof(bytes)) {
        const bytes c = i < n ? bytes_load(tiles + i * BN_TILE_BYTES) : bytes_fill(0);
        prefetch_from_memory(ahead + i * BN_TILE_BYTES);
        prefetch_from_second_cache(tiles + i * BN_TILE_BYTES + NEAR);
        bytes_store(codes, bytes_and(c, three));
        bytes_store(codes + sizeof(bytes), bytes_and(bytes_shr(c, 2), three));
        bytes_store(codes + 2 * sizeof(bytes), bytes_and(bytes_shr(c, 4), three));
        bytes_store(codes + 3 * sizeof(bytes), bytes_and(bytes_shr(c, 6), three));
    }
}

/* A tile of codes from 64 columns of 16 rows: four columns of each become one row. */
INLINE void unpack_rows(uint8_t *codes, const uint8_t *rows, const uint8_t *ahead,
                        size_t row_bytes) {
    __m512i a[TILE_ROWS], b[TILE_ROWS];
    UNROLL
    for (size_t r = 0; r < TILE_ROWS; r++) {
        a[r] = _mm512_loadu_si512(rows + r * row_bytes);
        prefetch_from_memory(ahead + r * BN_TILE_BYTES);
    }
    UNROLL
    for (size_t r = 0; r < TILE_ROWS; r += 2) { /* of two rows, words of each 128 bits in turn */
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    UNROLL
    for (size_t r = 0; r < TILE_ROWS; r += 4) { /* a[r + c]: word c of each 128 bits, four rows */
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    UNROLL
    for (size_t c = 0; c < 4; c++) { /* 128 bits from each of four registers, to all 16 rows */
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44);
        const __m512i high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
        const __m512i low_8 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
        const __m512i high_8 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
        uint8_t *to = codes + c * TILE_COLUMNS;
        _mm512_storeu_si512(to, _mm512_shuffle_i32x4(low, low_8, 0x88));
        _mm512_storeu_si512(to + 4 * TILE_COLUMNS, _mm512_shuffle_i32x4(low, low_8, 0xdd));
        _mm512_storeu_si512(to + 8 * TILE_COLUMNS, _mm512_shuffle_i32x4(high, high_8, 0x88));
        _mm512_storeu_si512(to + 12 * TILE_COLUMNS, _mm512_shuffle_i32x4(high, high_8, 0xdd));
    }
}

/* Step `step` of the part. The next panels are asked for as they lie in memory. */
INLINE void unpack_step(const code_part *w, size_t step, const size_t P) {
    const size_t of_panel = w->first_step + step, left = w->k_tiles - of_panel * STEP_TILES;
    const size_t bytes_of = w->row_bytes ? TILE_SIZE : STEP_TILES * BN_TILE_BYTES;
    UNROLL
    for (size_t p = 0; p < P; p++) {
        uint8_t *codes = w->codes + (step * PAIR + p) * TILE_SIZE;
        const uint8_t *panel = w->panel + p * w->stride;
        const uint8_t *ahead = w->panel + P * w->stride + (of_panel * P + p) * bytes_of;
        if (w->row_bytes)
            unpack_rows(codes, panel + of_panel * STEP_K, ahead, w->row_bytes);
        else if (left >= STEP_TILES)
            unpack_tiles(codes, panel + of_panel * bytes_of, ahead, STEP_TILES);
        else
            unpack_tiles(codes, panel + of_panel * bytes_of, ahead, left);
    }
}

/* Tokens that are multiplied together: a tile, or two, the second `apart` tokens behind the first.
 * Where they overlap, both have the same products. */
typedef struct token_block {
    size_t first, apart;
    int two;
} token_block;

INLINE size_t token_tiles(size_t tokens) {
    return (tokens + TILE_ROWS - 1) / TILE_ROWS;
}

INLINE size_t tile_tokens(size_t tokens) {
    return (tokens + token_tiles(tokens) - 1) / token_tiles(tokens);
}

INLINE size_t token_blocks(size_t tokens) {
    return (token_tiles(tokens) + 1) / 2;
}

/* Tiles are of one size. An odd one is the first; the last two may overlap. */
INLINE token_block token_block_of(size_t tokens, size_t i) {
    const size_t n = token_tiles(tokens), size = tile_tokens(tokens), odd = n % 2;
    const size_t tile = i == 0 ? 0 : 2 * i - odd, first = tile * size;
    if (i == 0 && odd)
        return (token_block){0, 0, 0};
    return (token_block){first, tile + 2 == n ? tokens - size - first : size, 1};
}

/* Tiles 0 to 3 are sums, of tile t of tokens and panel p 2 t + p, 4 and 5 tokens, 6 and 7 codes. */
INLINE void tiles_for(size_t tokens) {
    const uint8_t size = (uint8_t)tile_tokens(tokens), all = TILE_ROWS;
    tiles_configure((const uint8_t[TILE_REGISTERS]){size, size, size, size, size, size, all, all});
}

/* Adds the products of a step, of signed bytes (ternary codes are, too), T tiles of tokens and P
 * panels. q, q_1: of the tiles. */
INLINE void multiply_step(const int8_t *q, const int8_t *q_1, size_t q_stride, const uint8_t *codes,
                          const int T, const int P) {
    tile_load_once(4, q, q_stride);
    tile_load(6, codes, TILE_COLUMNS);
    tile_dot(0, 4, 6);
    if (P > 1) {
        tile_load(7, codes + TILE_SIZE, TILE_COLUMNS);
        tile_dot(1, 4, 7);
    }
    if (T > 1) {
        tile_load_once(5, q_1, q_stride);
        tile_dot(2, 5, 6);
        if (P > 1)
            tile_dot(3, 5, 7);
    }
}

#endif
