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

/* STRETCH: a tile is stored at least every so many steps, needed or not. Where none has been for
 * some 2,000 cycles, the next one takes 800 longer, as if that part of the unit had been switched
 * off; otherwise 16 (family 6, model 167). */
enum {
    STEP_TILES = 4,                          /* weight tiles per AMX tile */
    STEP_K = STEP_TILES * BN_TERNARY_TILE_K, /* columns per AMX tile, or step */
    PAIR = 2,                                /* panels, and token tiles, of a block */
    LEAD = 3,                                /* steps by which unpacking is ahead of multiplying */
    STRETCH = 8,
    RING = 4, /* steps whose unpacked codes are kept: 8 kB of L1 */
    RING_SIZE = RING * PAIR * TILE_SIZE,
    RING_AND_SPARE = RING_SIZE + TILE_SIZE
};

typedef enum code_kind { TERNARY_CODES, INT8_ROWS } code_kind;

/* The codes of a product. 16 int8 rows form a panel. */
typedef struct code_panels {
    const uint8_t *first;
    size_t stride; /* bytes from one panel to the next */
    size_t panels;
    size_t k_tiles; /* weight tiles of a panel; int8: columns / 16 */
} code_panels;

/* The codes of one or two panels, and what is prefetched meanwhile. */
typedef struct code_source {
    const uint8_t *panel; /* the first */
    size_t stride;        /* to the second */
    size_t k_tiles;       /* weight tiles of a panel; int8: columns / 16 */
    size_t steps;
    uint8_t *ring;        /* unpacked codes, [step % RING][panel][TILE_SIZE], and a spare tile */
    const uint8_t *ahead; /* what to prefetch at the next step */
    size_t ahead_lines;   /* how many cache lines of it */
    const float *out;     /* outputs that will be written: rows of P panels, to be prefetched too */
    size_t out_stride;    /* in floats */
    size_t out_rows, out_each; /* how many, and at each step */
} code_source;

/* P panels from `panel` on, for token block `i` of n. Each block prefetches an equal share of the
 * panels that come next in memory, because a burst of it would wait for memory, which would be idle
 * later. */
INLINE code_source source_of(const code_panels *all, size_t panel, uint8_t *ring, size_t i,
                             size_t n, const int P) {
    const size_t steps = (all->k_tiles + STEP_TILES - 1) / STEP_TILES;
    const size_t lines = (size_t)P * all->stride / BN_TILE_BYTES;
    const uint8_t *panels = all->first + panel * all->stride;
    return (code_source){.panel = panels,
                         .stride = all->stride,
                         .k_tiles = all->k_tiles,
                         .steps = steps,
                         .ring = ring,
                         .ahead =
                             panels + all->panels * all->stride + lines * i / n * BN_TILE_BYTES,
                         .ahead_lines = (lines + steps * n - 1) / (steps * n)};
}

/* Builds an AMX tile from four weight tiles, or from n and zeros. */
INLINE void unpack_tiles(uint8_t *to, const uint8_t *tiles, size_t n) {
    const bytes three = bytes_fill(3);
    UNROLL
    for (size_t i = 0; i < STEP_TILES; i++, to += 4 * sizeof(bytes)) {
        const bytes c = i < n ? bytes_load(tiles + i * BN_TILE_BYTES) : bytes_fill(0);
        bytes_store(to, bytes_and(c, three));
        bytes_store(to + sizeof(bytes), bytes_and(bytes_shr(c, 2), three));
        bytes_store(to + 2 * sizeof(bytes), bytes_and(bytes_shr(c, 4), three));
        bytes_store(to + 3 * sizeof(bytes), bytes_and(bytes_shr(c, 6), three));
    }
}

/* Builds an AMX tile from 64 columns of 16 rows: four columns of all rows become one tile row. */
INLINE void unpack_rows(uint8_t *to, const uint8_t *rows, size_t row_bytes) {
    __m512i a[TILE_ROWS], b[TILE_ROWS];
    UNROLL
    for (size_t r = 0; r < TILE_ROWS; r++)
        a[r] = _mm512_loadu_si512(rows + r * row_bytes);
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
        uint8_t *row = to + c * TILE_COLUMNS;
        _mm512_storeu_si512(row, _mm512_shuffle_i32x4(low, low_8, 0x88));
        _mm512_storeu_si512(row + 4 * TILE_COLUMNS, _mm512_shuffle_i32x4(low, low_8, 0xdd));
        _mm512_storeu_si512(row + 8 * TILE_COLUMNS, _mm512_shuffle_i32x4(high, high_8, 0x88));
        _mm512_storeu_si512(row + 12 * TILE_COLUMNS, _mm512_shuffle_i32x4(high, high_8, 0xdd));
    }
}

/* Unpacks a step of P panels. */
INLINE void unpack_step(const code_source *w, size_t step, const code_kind kind, const int P) {
    const size_t left = w->k_tiles - step * STEP_TILES;
    UNROLL
    for (size_t p = 0; p < (size_t)P; p++) {
        uint8_t *to = w->ring + (step % RING * PAIR + p) * TILE_SIZE;
        const uint8_t *panel = w->panel + p * w->stride;
        if (kind == INT8_ROWS)
            unpack_rows(to, panel + step * STEP_K, w->stride / BN_PANEL);
        else if (left >= STEP_TILES)
            unpack_tiles(to, panel + step * STEP_TILES * BN_TILE_BYTES, STEP_TILES);
        else
            unpack_tiles(to, panel + step * STEP_TILES * BN_TILE_BYTES, left);
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

/* block(T, P) with constants, for one or two token tiles and one or two panels. */
#define EACH_SHAPE(block, two_tiles, two_panels)                                                   \
    if (two_tiles) {                                                                               \
        if (two_panels)                                                                            \
            block(2, 2);                                                                           \
        else                                                                                       \
            block(2, 1);                                                                           \
    } else if (two_panels) {                                                                       \
        block(1, 2);                                                                               \
    } else {                                                                                       \
        block(1, 1);                                                                               \
    }

/* Tile registers: 0 to 3 are sums (2 t + p: token tile t, panel p), 4 and 5 tokens, 6 and 7
 * codes. */
INLINE void tiles_for(size_t tokens) {
    const uint8_t size = (uint8_t)tile_tokens(tokens), all = TILE_ROWS;
    tiles_configure((const uint8_t[TILE_REGISTERS]){size, size, size, size, size, size, all, all});
}

/* Adds the products of a step, T token tiles times P panels, as signed bytes (which ternary codes
 * are too). q, q_1: activations of the token tiles. apart: bytes from the first panel's codes to
 * the second's. */
INLINE void multiply_step(const int8_t *q, const int8_t *q_1, size_t q_stride, const uint8_t *codes,
                          size_t apart, const int T, const int P) {
    tile_load(4, q, q_stride);
    tile_load(6, codes, TILE_COLUMNS);
    tile_dot(0, 4, 6);
    if (P > 1) {
        tile_load(7, codes + apart, TILE_COLUMNS);
        tile_dot(1, 4, 7);
    }
    if (T > 1) {
        tile_load(5, q_1, q_stride);
        tile_dot(2, 5, 6);
        if (P > 1)
            tile_dot(3, 5, 7);
    }
}

INLINE void start_unpacking(const code_source *w, const code_kind kind, const int P) {
    for (size_t s = 0; s < bn_min(LEAD, w->steps); s++)
        unpack_step(w, s, kind, P);
}

INLINE void clear_sums(void) {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
}

/* Outputs are as large as L2: without this their stores would wait for memory at the end of a block
 * (100M weights, 128 tokens, one thread: 7 %). */
INLINE void will_write(code_source *w, const float *out, size_t stride, size_t rows) {
    w->out = out;
    w->out_stride = stride;
    w->out_rows = rows;
    w->out_each = (rows + w->steps - 1) / w->steps;
}

INLINE void prefetch_share(code_source *w, size_t step, const int P) {
    for (size_t i = 0; i < w->ahead_lines; i++, w->ahead += BN_TILE_BYTES)
        _mm_prefetch((const char *)w->ahead, _MM_HINT_T1);
    const size_t end = bn_min((step + 1) * w->out_each, w->out_rows);
    for (size_t r = step * w->out_each; r < end; r++)
        for (size_t p = 0; p < (size_t)P; p++)
            __builtin_prefetch(w->out + r * w->out_stride + p * BN_PANEL, 1);
}

/* Adds the products of steps `first` to `end`. Unpacking comes after multiplying: it is for later
 * steps. */
INLINE void multiply_steps(code_source *w, size_t first, size_t end, const int8_t *q,
                           const int8_t *q_1, size_t q_stride, const code_kind kind, const int T,
                           const int P) {
    for (size_t s = first; s < end; s++) {
        prefetch_share(w, s, P);
        multiply_step(q + s * STEP_K, q_1 + s * STEP_K, q_stride,
                      w->ring + s % RING * PAIR * TILE_SIZE, TILE_SIZE, T, P);
        if (s % STRETCH == STRETCH - 1)
            tile_store(4, w->ring + RING_SIZE, TILE_COLUMNS); /* for nobody: see STRETCH */
        if (s + LEAD < w->steps)
            unpack_step(w, s + LEAD, kind, P);
    }
}

/* The sums of a block, from the tile registers: [token tile][panel][token][row] */
typedef int32_t block_sums[PAIR][PAIR][TILE_ROWS][BN_PANEL];

INLINE void store_sums(block_sums to, const int T, const int P) {
    tile_store(0, to[0][0], TILE_COLUMNS);
    if (P > 1)
        tile_store(1, to[0][1], TILE_COLUMNS);
    if (T > 1)
        tile_store(2, to[1][0], TILE_COLUMNS);
    if (T > 1 && P > 1)
        tile_store(3, to[1][1], TILE_COLUMNS);
}

#endif
