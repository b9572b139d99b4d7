/* SPDX-License-Identifier: MIT
 *
 * sketch.c: verifies that the sketches of a packed file match their codes (export/FORMAT.md §4).
 * The head trusts them (screen.c): a wrong sketch could hide the most likely token. All sums here
 * are exact, so step and deviation are compared bit by bit.
 */
#include "sketch.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "rows.h"
#include "sizes.h"

enum { CHUNK = 4096 /* most codes of a row that are checked together */ };

typedef struct bn_sketch {
    const bn_kernels *kernels;
    const uint8_t *codes, *tiles, *step, *deviation;
    size_t rows, cols;
    atomic_size_t wrong; /* the first wrong row; rows: none */
} bn_sketch;

/* A chunk as rows of `size` bytes; c and s are 0 past the chunk's end. */
typedef struct bn_chunk {
    _Alignas(64) int8_t rows[3 * CHUNK];
    int8_t *c, *s, *one; /* codes, their sketch, ones */
    size_t size;         /* in whole units of int8_rows */
} bn_chunk;

/* Σc, Σs, Σc², Σcs and Σs² over a row so far. */
typedef struct bn_sums {
    int64_t c, s, cc, cs, ss;
} bn_sums;

static void begin_chunks(bn_chunk *chunk, size_t cols) {
    chunk->size = bn_int8_row(bn_min(cols, CHUNK));
    chunk->c = chunk->rows, chunk->s = chunk->c + chunk->size, chunk->one = chunk->s + chunk->size;
    memset(chunk->one, 1, chunk->size);
}

/* rows: 1 adds the sums of the codes only, 2 all sums. */
static void add_chunk(const bn_kernels *kernels, const bn_chunk *chunk, size_t rows,
                      bn_sums *sums) {
    const int32_t ones = (int32_t)chunk->size;
    int32_t sum[2] = {0}, product[2][2] = {{0}};
    bn_int8_rows both = {.acc = sum,
                         .acc_stride = 2,
                         .codes = chunk->c,
                         .row_bytes = chunk->size,
                         .rows = rows,
                         .q = chunk->one,
                         .q_stride = chunk->size,
                         .q_sums = &ones,
                         .tokens = 1};
    kernels->products.int8_rows(&both);
    both.acc = product[0], both.q = chunk->c, both.q_sums = sum, both.tokens = rows;
    kernels->products.int8_rows(&both);
    sums->c += sum[0], sums->s += sum[1];
    sums->cc += product[0][0], sums->cs += product[0][1], sums->ss += product[1][1];
}

/* Packs 16 bytes below 4 into 2 bits each, in the layout of a row of a tile. */
static uint32_t pack(const void *bytes) {
    uint32_t four[4];
    memcpy(four, bytes, sizeof four);
    return four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6;
}

/* Computes the sketch of the first n codes; returns whether the tiles hold the same. */
static int sketch(bn_chunk *chunk, size_t n, int8_t t, const uint8_t *tiles) {
    typedef int8_t codes __attribute__((vector_size(16)));
    const int8_t inside[2 * BN_TERNARY_TILE_K] = {3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};
    const int8_t minus_t = (int8_t)-t;
    uint32_t wrong = 0;
    for (size_t k = 0; k < n; k += BN_TERNARY_TILE_K) {
        codes c, s;
        uint32_t word, mask = UINT32_MAX;
        memcpy(&c, chunk->c + k, sizeof c);
        s = -((c > minus_t) + (c >= 0) + (c >= t)); /* true is -1 */
        memcpy(chunk->s + k, &s, sizeof s);
        memcpy(&word, tiles + k / BN_TERNARY_TILE_K * BN_TILE_BYTES, sizeof word);
        if (k + BN_TERNARY_TILE_K > n)
            mask = pack(inside + BN_TERNARY_TILE_K - (n - k));
        wrong |= (word ^ pack(&s)) & mask;
    }
    memset(chunk->s + n, 0, chunk->size - n);
    return wrong == 0;
}

static int is_right(const bn_sketch *of, size_t row, bn_chunk *chunk) {
    const size_t k_tiles = bn_div_up(of->cols, BN_TERNARY_TILE_K);
    const uint8_t *codes = of->codes + row * bn_int8_row(of->cols);
    const uint8_t *tiles =
        of->tiles + row / BN_PANEL * k_tiles * BN_TILE_BYTES + row % BN_PANEL * sizeof(uint32_t);
    const double cols = (double)of->cols;
    int64_t t = 0;
    int right = 1;
    bn_sums sums = {0};
    for (int pass = 0; pass < 2; pass++) { /* the first finds the step of the row */
        t = (int64_t)fmax(1, rint(sqrt((double)sums.cc / cols)));
        sums = (bn_sums){0};
        for (size_t k = 0; k < of->cols; k += CHUNK) {
            const size_t n = bn_min(of->cols - k, CHUNK);
            memcpy(chunk->c, codes + k, n);
            memset(chunk->c + n, 0, chunk->size - n);
            if (pass == 1)
                right &= sketch(chunk, n, (int8_t)t, tiles + k / BN_TERNARY_TILE_K * BN_TILE_BYTES);
            add_chunk(of->kernels, chunk, pass == 1 ? 2 : 1, &sums);
        }
    }
    const int64_t n = (int64_t)of->cols;
    const int64_t left = 4 * sums.cc - 4 * t * (2 * sums.cs - 3 * sums.c) +
                         t * t * (4 * sums.ss - 12 * sums.s + 9 * n); /* Σ (2c - (2s - 3)·t)² */
    const float step = (float)t, deviation = (float)sqrt((double)left / 4 / cols);
    return right && memcmp(of->step + row * sizeof step, &step, sizeof step) == 0 &&
           memcmp(of->deviation + row * sizeof step, &deviation, sizeof step) == 0;
}

static void check_rows(void *context, int32_t thread, size_t first, size_t end) {
    bn_sketch *of = context;
    bn_chunk chunk;
    (void)thread;
    begin_chunks(&chunk, of->cols);
    for (size_t row = first; row < end; row++)
        if (!is_right(of, row, &chunk)) {
            size_t before = atomic_load(&of->wrong);
            while (row < before && !atomic_compare_exchange_weak(&of->wrong, &before, row))
                ;
            return;
        }
}

int bn_steps_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    (void)cols;
    return bn_tiles_size(rows, 1, 1, size) && /* 16 rows, 4 bytes each */
           !__builtin_mul_overflow(*size, 2u, size);
}

bn_sketch_parts bn_sketch_at(uint64_t rows, uint64_t cols) {
    uint64_t codes, tiles, steps;
    bn_lines_size(rows, cols, BN_INT8_UNIT, &codes);
    bn_tiles_size(rows, cols, BN_TERNARY_TILE_K, &tiles);
    bn_steps_size(rows, cols, &steps);
    return (bn_sketch_parts){codes, codes + tiles, codes + tiles + steps / 2};
}

size_t bn_wrong_sketch(const uint8_t *data, size_t rows, size_t cols, const bn_kernels *kernels,
                       bn_pool *pool) {
    enum { ROWS = 256 }; /* of a part */
    const bn_sketch_parts at = bn_sketch_at(rows, cols);
    bn_sketch of = {.kernels = kernels,
                    .codes = data,
                    .tiles = data + at.tiles,
                    .step = data + at.step,
                    .deviation = data + at.deviation,
                    .rows = rows,
                    .cols = cols};
    atomic_init(&of.wrong, rows);
    if (pool != NULL)
        bn_pool_run(pool, rows, ROWS, check_rows, &of);
    else
        check_rows(&of, 0, 0, rows);
    return atomic_load(&of.wrong);
}
