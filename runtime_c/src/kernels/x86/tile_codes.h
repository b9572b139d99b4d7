/* SPDX-License-Identifier: MIT
 *
 * tile_codes.h: ternary and int8 codes as AMX tiles, and their products with token tiles.
 *
 * The instruction expects weights as four adjacent columns of each of 16 rows, which is the layout
 * of a field of a weight tile (FORMAT.md §4). So four weight tiles, unpacked to a byte per code,
 * form one AMX tile, and activations are used as stored.
 */
#ifndef BITNET_X86_TILE_CODES_H
#define BITNET_X86_TILE_CODES_H

#include "integer.h"
#include "tiles.h"

enum {
    STEP_TILES = 4,                          /* weight tiles per AMX tile */
    STEP_K = STEP_TILES * BN_TERNARY_TILE_K, /* columns per AMX tile */
    PAIR = 2,                                /* panels, and token tiles, of a block */
    PART_STEPS = 10,                         /* steps unpacked at a time: 20 kB */
    EARLY = 3,                               /* steps by which unpacking is ahead of loading */
    CODES_SIZE = PART_STEPS * PAIR * TILE_SIZE
};

/* A range of columns of one or two panels, which are ternary codes or 16 int8 rows each. */
typedef struct code_part {
    const uint8_t *panel;       /* the first */
    size_t stride;              /* to the second */
    size_t k_tiles;             /* weight tiles of a panel; int8: columns / 16 */
    size_t row_bytes;           /* bytes of an int8 row; 0: ternary codes */
    size_t first_step, n_steps; /* range of AMX tiles within the panel */
    uint8_t *codes;             /* [step][panel][TILE_SIZE] */
} code_part;

enum { SHARE = BN_SCALE_GROUP_K / STEP_K }; /* steps with the same scale, never split by parts */

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

/* Builds an AMX tile from four weight tiles, or from n and zeros. ahead: where to prefetch the same
 * amount for later. */
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

/* Builds an AMX tile from 64 columns of 16 rows: four columns of all rows become one tile row. */
INLINE void unpack_rows(uint8_t *codes, const uint8_t *rows, const uint8_t *ahead,
                        size_t row_bytes) {
    __m512i a[TILE_ROWS], b[TILE_ROWS];
    UNROLL
    for (size_t r = 0; r < TILE_ROWS; r++) {
        a[r] = _mm512_loadu_si512(rows + r * row_bytes);
        prefetch_from_memory(ahead + r * BN_TILE_BYTES);
    }
    UNROLL
    for (size_t r = 0; r < TILE_ROWS; r += 2) { /* interleave words of two rows within 128 bits */
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    UNROLL
    for (size_t r = 0; r < TILE_ROWS; r += 4) { /* a[r + c]: word c of each 128 bits of four rows */
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    UNROLL
    for (size_t c = 0; c < 4; c++) { /* joins 128 bits from each of four registers: all 16 rows */
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

/* Unpacks step `step` of the part and prefetches the next panels in memory order. */
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

/* Tokens that are multiplied together: one tile, or two, the second `apart` tokens after the first.
 * Where they overlap, both compute the same products. */
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

/* All tiles have the same size. If their number is odd, the first block has one; the last two tiles
 * may overlap. */
INLINE token_block token_block_of(size_t tokens, size_t i) {
    const size_t n = token_tiles(tokens), size = tile_tokens(tokens), odd = n % 2;
    const size_t tile = i == 0 ? 0 : 2 * i - odd, first = tile * size;
    if (i == 0 && odd)
        return (token_block){0, 0, 0};
    return (token_block){first, tile + 2 == n ? tokens - size - first : size, 1};
}

/* Tile registers: 0 to 3 are sums (2 t + p: token tile t, panel p), 4 and 5 tokens, 6 and 7
 * codes. */
INLINE void tiles_for(size_t tokens) {
    const uint8_t size = (uint8_t)tile_tokens(tokens), all = TILE_ROWS;
    tiles_configure((const uint8_t[TILE_REGISTERS]){size, size, size, size, size, size, all, all});
}

/* Adds the products of a step, T token tiles times P panels, as signed bytes (which ternary codes
 * are too). q, q_1: activations of the token tiles. */
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
