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

/* Some columns of one or two panels. */
typedef struct code_part {
    const uint8_t *tiles;       /* of the first panel */
    size_t stride;              /* to the second */
    const uint8_t *ahead;       /* the next panels, as they lie in memory */
    size_t k_tiles;             /* weight tiles */
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

/* Part i of P panels, which begin at `tiles`. */
INLINE code_part part_of(const uint8_t *tiles, size_t stride, size_t k_tiles, size_t i,
                         uint8_t *codes, const size_t P) {
    const size_t shares = shares_of(k_tiles), parts = parts_of(k_tiles);
    const size_t first = SHARE * (shares * i / parts), most = SHARE * (shares * (i + 1) / parts);
    const size_t last = bn_min(most, (k_tiles + STEP_TILES - 1) / STEP_TILES);
    const size_t from = first * STEP_TILES;
    return (code_part){.tiles = tiles + from * BN_TILE_BYTES,
                       .stride = stride,
                       .ahead = tiles + P * (stride + from * BN_TILE_BYTES),
                       .k_tiles = bn_min(last * STEP_TILES, k_tiles) - from,
                       .first_step = first,
                       .n_steps = last - first,
                       .codes = codes};
}

/* A tile of codes from four weight tiles, or from what is left of them, and zeros. */
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

INLINE void unpack_step(const code_part *w, size_t step, const size_t P) {
    const size_t n = w->k_tiles - step * STEP_TILES;
    UNROLL
    for (size_t p = 0; p < P; p++) {
        uint8_t *codes = w->codes + (step * PAIR + p) * TILE_SIZE;
        const uint8_t *tiles = w->tiles + p * w->stride + step * STEP_TILES * BN_TILE_BYTES;
        const uint8_t *ahead = w->ahead + (step * P + p) * STEP_TILES * BN_TILE_BYTES;
        if (n >= STEP_TILES)
            unpack_tiles(codes, tiles, ahead, STEP_TILES);
        else
            unpack_tiles(codes, tiles, ahead, n);
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

/* Adds the products of a step, T tiles of tokens and P panels. q, q_1: of the tiles. */
INLINE void multiply_step(const int8_t *q, const int8_t *q_1, size_t q_stride, const uint8_t *codes,
                          const int T, const int P) {
    tile_load_once(4, q, q_stride);
    tile_load(6, codes, TILE_COLUMNS);
    tile_dot_unsigned(0, 4, 6);
    if (P > 1) {
        tile_load(7, codes + TILE_SIZE, TILE_COLUMNS);
        tile_dot_unsigned(1, 4, 7);
    }
    if (T > 1) {
        tile_load_once(5, q_1, q_stride);
        tile_dot_unsigned(2, 5, 6);
        if (P > 1)
            tile_dot_unsigned(3, 5, 7);
    }
}

#endif
