/* SPDX-License-Identifier: MIT
 *
 * lookup_template.h: products of many rows and many tokens, mostly without multiplying. A byte of a
 * ternary tile holds four codes of a row, and their product with four activations is one of 81
 * sums. A table holds these sums for as many tokens as a register has 16-bit lanes, indexed by the
 * weight byte: one addition does the work of four multiply-adds for every token. (Tables with
 * tokens in lanes: Vec-LUT, arXiv 2512.06443. Here the index is the byte as stored in the file.)
 *
 * The bottleneck is register loads: 16 columns of a row need four entries and the sum itself, and
 * Zen 4 loads 512 bits per cycle. The multipliers would idle meanwhile, so PRODUCT_ROWS rows of
 * each panel are multiplied instead, also with tokens in lanes. On Zen 4, where vpdpbusd alone
 * reaches 228 of 235 GMAC/s: 260 with tables for all rows; 300, 315 and 294 with 4, 6 and 8 rows
 * multiplied; 294 with 6 rows that take one tile at a time, which loads and stores their sums twice
 * as often. (256-bit registers, too few for two tiles: 212, and 240 with 6; vpmaddubsw: 212, and
 * 219 with 2.)
 *
 * Zen 4, cycles per tile of a panel, 32 tokens: 88, of which the loads need 63 and the vector pipes
 * 65; 71 without the multiplied rows, 56 with only these, 80 without loading and storing their
 * sums, 84 with all sums in L1. Huge pages and identical codes change nothing. Alternatives tried
 * there:
 *   entries of 16 tokens, two tiles side by side in a table, half as many sums: 95, as two 256-bit
 *     loads at random addresses do not pair
 *   offsets by pdep and bextr: 99; sums stored as two halves: 95, stored later: 88
 *   three tiles per step: 92, for lack of registers
 *   sums converted to floats at once: no faster, as writing y costs the same either way
 *
 * The tables of a column of tiles take 20 kB of L1. Sums stream through it from L2, where each kind
 * is contiguous so that the hardware prefetches them, which gives 13 % of the speed. Building the
 * tables costs as much as a hundred rows.
 *
 * On Zen 5, where vpdpbusd reaches 0.98 of the peak, in fractions of that peak, 32 tokens: 1.06
 * with 2560 rows of 2560 columns, 0.98 with 1024 rows, 0.96 with 640. The cost per output is not
 * hidden: 768 columns gain nothing. A row takes 3.1 cycles with its sums in L1 and 3.9 from L2,
 * while the loads alone need 2.5. Alternatives tried there:
 *   codes of two rows by valignq and vmovq, not by a load among the 512-bit ones: 1.11, and the
 *     prefill of 2560 columns some 3 % faster; not tried on Zen 4
 *   precomputed 16-bit offsets in memory: 4.7 cycles per row instead of 3.4
 *   tables of 3, 3, 3, 3 and 4 columns, two tiles per pass, half as many sums: 1.03
 *   products of other panels, rows in lanes, interleaved with table rows: 0.97
 *   vpermw, 3 columns per register: the additions cancel its gain, 208 multiply-adds per cycle
 *     without loads; an estimated 150 with unpacking and widening
 *
 * Parameters:
 *   PRODUCT_ROWS   rows of each panel that are multiplied, even
 *   PRODUCT_TILES  tiles per step, which share these rows evenly: a divisor
 *   PRODUCT_DOT    adds four products of a code and an activation
 */
#if !defined(PRODUCT_ROWS) || !defined(PRODUCT_TILES) || !defined(PRODUCT_DOT)
#error "a parameter is missing"
#endif

#include "integer.h"

enum {
    LOOKUP_TOKENS = sizeof(bytes) / sizeof(int16_t),
    INDEX_SHIFT = sizeof(bytes) == 64 ? 6 : 5, /* from a weight byte to a table offset */
    INDEX_MASK = 255 << INDEX_SHIFT,
    /* Codes leave most cache lines of a table unused. A stride of an odd number of lines spreads
     * the used ones of the four tables over the cache's sets: 270 GMAC/s on Zen 4, 199 without. */
    TABLE_BYTES = 256 * sizeof(bytes) + 37 * 64,
    TABLE_ROWS = BN_PANEL - PRODUCT_ROWS,
    PASS_ROWS = PRODUCT_ROWS / PRODUCT_TILES,
    STEP_REACH = PRODUCT_TILES * BN_TERNARY_TILE_K * 127 /* largest sum of a step's tiles */
};
_Static_assert(4 * TABLE_BYTES <= BN_LOOKUP_TABLES, "the sums come after the tables");

/* Words of four columns, one per token, from rows of 16 columns: transposes blocks of 4 x 4
 * words. */
INLINE void lookup_words(bytes word[2][4], const __m128i *row) {
    for (int h = 0; h < 2; h++) {
        const __m128i *r = row + h * VEC_ROWS;
        const bytes a = bytes_every4(r), b = bytes_every4(r + 1);
        const bytes c = bytes_every4(r + 2), d = bytes_every4(r + 3);
        word[h][0] = bytes_low64(bytes_low32(a, b), bytes_low32(c, d));
        word[h][1] = bytes_high64(bytes_low32(a, b), bytes_low32(c, d));
        word[h][2] = bytes_low64(bytes_high32(a, b), bytes_high32(c, d));
        word[h][3] = bytes_high64(bytes_high32(a, b), bytes_high32(c, d));
    }
}

/* Activations of the 16 columns from q on, tokens in lanes, 0 for missing tokens. */
INLINE void lookup_columns(shorts column[16], bytes word[2][4], const int8_t *q, size_t q_stride,
                           size_t tokens) {
    __m128i row[LOOKUP_TOKENS], mixed[16];
    UNROLL
    for (size_t t = 0; t < LOOKUP_TOKENS; t++)
        row[t] =
            t < tokens ? _mm_load_si128((const __m128i *)(q + t * q_stride)) : _mm_setzero_si128();
    lookup_words(word, row);
    for (__m128i *half = row; half < row + LOOKUP_TOKENS; half += 16)
        for (int round = 0; round < 4; round++) { /* four perfect shuffles transpose 16 by 16 */
            UNROLL
            for (int i = 0; i < 8; i++) {
                mixed[2 * i] = _mm_unpacklo_epi8(half[i], half[i + 8]);
                mixed[2 * i + 1] = _mm_unpackhi_epi8(half[i], half[i + 8]);
            }
            memcpy(half, mixed, sizeof mixed);
        }
    UNROLL
    for (int k = 0; k < 16; k++)
        column[k] = shorts_widen(row[k], row[LOOKUP_TOKENS - 16 + k]);
}

/* The table for byte i of a row: entry b is the sum of (c - 1)·column over the codes c of b. */
INLINE void lookup_table(uint8_t *table, const shorts column[16], int i) {
    const shorts y0 = column[i], y1 = column[4 + i], y2 = column[8 + i], y3 = column[12 + i];
    shorts sum3 = -(y0 + y1 + y2 + y3);
    for (int c3 = 0; c3 < 3; c3++, sum3 += y3) {
        shorts sum2 = sum3;
        UNROLL
        for (int c2 = 0; c2 < 3; c2++, sum2 += y2) {
            shorts sum1 = sum2;
            UNROLL
            for (int c1 = 0; c1 < 3; c1++, sum1 += y1) {
                shorts *entry = (shorts *)(void *)table + (64 * c3 + 16 * c2 + 4 * c1);
                entry[0] = sum1;
                entry[1] = sum1 + y0;
                entry[2] = sum1 + y0 + y0;
            }
        }
    }
}

/* total += the products of a row's codes, as stored, in all tiles of a step; word:
 * [tile][half][field]. */
INLINE void lookup_product(sums total[2], const uint8_t *const codes[PRODUCT_TILES], size_t at,
                           bytes word[PRODUCT_TILES][2][4]) {
    sums sum[2] = {total[0], total[1]};
    UNROLL
    for (int i = 0; i < PRODUCT_TILES; i++) {
        const bytes w = bytes_spread((const int8_t *)codes[i] + at);
        for (int half = 0; half < 2; half++)
            sum[half] = fields_dot(sum[half], w, word[i][half], PRODUCT_DOT);
    }
    total[0] = sum[0], total[1] = sum[1];
}

/* One pass over the rows: adds table entries for tile `pass` of a step to sum, and the products of
 * PASS_ROWS of the multiplied rows with all tiles of the step to product. */
static void lookup_rows(shorts *sum, sums *product, const uint8_t *const tile[PRODUCT_TILES],
                        int pass, bytes words[PRODUCT_TILES][2][4], const bn_matmul *m,
                        const uint8_t *table) {
    enum { S = INDEX_SHIFT, AHEAD = 2 * BN_TILE_BYTES };
    bytes word[PRODUCT_TILES][2][4]; /* local copy: stores cannot alias it */
    memcpy(word, words, sizeof word);
    const uint8_t *codes = tile[pass];
    size_t at = 4 * (size_t)(TABLE_ROWS + pass * PASS_ROWS); /* of the first multiplied row */
    for (size_t p = 0; p < m->panels; p++, codes += m->panel_stride, at += m->panel_stride) {
        _mm_prefetch((const char *)codes + AHEAD, _MM_HINT_T0);
        UNROLL
        for (int row = 0; row < TABLE_ROWS; row += 2, sum += 2) {
            UNROLL
            for (int i = 0; i < PASS_ROWS; i++) /* interleaved with table rows */
                if (i * TABLE_ROWS / PASS_ROWS / 2 == row / 2)
                    lookup_product(product + 2 * i, tile, at + 4 * (size_t)i, word);
            uint64_t w; /* codes of two rows: loads are the bottleneck */
            memcpy(&w, codes + 4 * row, sizeof w);
#define ENTRY(i, index)                                                                            \
    (*(const shorts *)(const void *)(table + i * TABLE_BYTES + (index & INDEX_MASK)))
            sum[0] = sum[0] + ENTRY(0, w << S) + ENTRY(1, w >> (8 - S)) + ENTRY(2, w >> (16 - S)) +
                     ENTRY(3, w >> (24 - S));
            sum[1] = sum[1] + ENTRY(0, w >> (32 - S)) + ENTRY(1, w >> (40 - S)) +
                     ENTRY(2, w >> (48 - S)) + ENTRY(3, w >> (56 - S));
#undef ENTRY
        }
        product += 2 * PASS_ROWS;
    }
}

/* total += sum, sum = 0. */
static void lookup_fold(sums *total, shorts *sum, size_t n) {
    for (size_t i = 0; i < n; i++, total += 2) {
        const int16_t *number = (const int16_t *)(const void *)&sum[i];
        total[0] = sums_add(total[0], sums_widen(number));
        total[1] = sums_add(total[1], sums_widen(number + LOOKUP_TOKENS / 2));
        sum[i] = (shorts){0};
    }
}

/* Transposes a square of sums to acc: half of the tokens, and VEC_ROWS rows from row `first` of
 * panel p on. Totals, whose tables count c - 1, get Σq added to match bn_matmul; products do not
 * need it. */
INLINE void lookup_store(const bn_matmul *m, const sums *total, const sums *product, size_t p,
                         size_t first, size_t half) {
    const sums q_sum = total[2 * m->panels * TABLE_ROWS + half];
    const size_t t0 = half * VEC_ROWS;
    int32_t *acc = m->acc + t0 * m->acc_stride + p * BN_PANEL + first;
    sums square[VEC_ROWS], mixed[VEC_ROWS];
    UNROLL
    for (size_t row = 0; row < VEC_ROWS; row++) {
        const size_t r = first + row, i = r - TABLE_ROWS; /* i: among the multiplied rows */
        square[row] =
            r < TABLE_ROWS
                ? sums_add(total[2 * (p * TABLE_ROWS + r) + half], q_sum)
                : product[2 * ((i / PASS_ROWS * m->panels + p) * PASS_ROWS + i % PASS_ROWS) + half];
    }
    for (int n = VEC_ROWS; n > 1; n /= 2) {
        UNROLL
        for (int i = 0; i < VEC_ROWS / 2; i++) {
            mixed[2 * i] = sums_mix_low(square[i], square[i + VEC_ROWS / 2]);
            mixed[2 * i + 1] = sums_mix_high(square[i], square[i + VEC_ROWS / 2]);
        }
        memcpy(square, mixed, sizeof mixed);
    }
    for (size_t t = 0; t0 + t < m->tokens && t < VEC_ROWS; t++)
        sums_store(acc + t * m->acc_stride, square[t]);
}

static void ternary_lookup(const bn_matmul *m, void *scratch) {
    const size_t rows = m->panels * TABLE_ROWS, pass_sums = 2 * m->panels * PASS_ROWS;
    uint8_t *table = scratch;
    sums *product = (sums *)(void *)(table + BN_LOOKUP_TABLES);    /* [pass][pass_sums] */
    shorts *sum = (shorts *)(product + PRODUCT_TILES * pass_sums); /* [rows + 1], Σq last */
    sums *total = (sums *)(void *)(sum + rows + 1);                /* [rows + 1][2] */
    shorts column[PRODUCT_TILES][16], reach = {0}; /* reach: Σ|q| since the last fold */
    bytes word[PRODUCT_TILES][2][4];
    memset(product, 0, (size_t)((uint8_t *)(total + 2 * (rows + 1)) - (uint8_t *)product));
    for (size_t k = 0; k < m->k_tiles; k += PRODUCT_TILES) {
        const uint8_t *tile[PRODUCT_TILES];
        int16_t most = 0;
        for (int t = 0; t < LOOKUP_TOKENS; t++)
            most = reach[t] > most ? reach[t] : most;
        if (most > INT16_MAX - STEP_REACH) {
            lookup_fold(total, sum, rows + 1);
            reach = (shorts){0};
        }
        for (size_t i = 0; i < PRODUCT_TILES; i++) { /* beyond the last tile: zero activations */
            const int beyond = k + i >= m->k_tiles;
            const size_t kt = beyond ? k : k + i;
            tile[i] = m->tiles + kt * BN_TILE_BYTES;
            lookup_columns(column[i], word[i], m->q + kt * BN_TERNARY_TILE_K, m->q_stride,
                           beyond ? 0 : m->tokens);
            for (int c = 0; c < 16; c++) {
                sum[rows] += column[i][c];
                reach += shorts_abs(column[i][c]);
            }
        }
        for (int pass = 0; pass < PRODUCT_TILES; pass++) {
            for (int i = 0; i < 4; i++)
                lookup_table(table + i * TABLE_BYTES, column[pass], i);
            lookup_rows(sum, product + (size_t)pass * pass_sums, tile, pass, word, m, table);
        }
    }
    lookup_fold(total, sum, rows + 1);
    for (size_t p = 0; p < m->panels; p++)
        for (size_t first = 0; first < BN_PANEL; first += VEC_ROWS)
            for (size_t half = 0; half < 2 && half * VEC_ROWS < m->tokens; half++)
                lookup_store(m, total, product, p, first, half);
}

#undef PRODUCT_ROWS
#undef PRODUCT_TILES
#undef PRODUCT_DOT
