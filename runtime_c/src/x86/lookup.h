/* SPDX-License-Identifier: MIT
 *
 * lookup.h: many rows by many tokens without multiplying. A byte of a ternary tile holds four codes
 * of a row; what they make of four activations is one of 81 sums. Those are put in a table, for
 * as many tokens as a register has 16-bit lanes, and the byte of weights is the index into it: one
 * addition does the work of four multiply-adds, for every token. (Tables with tokens in the lanes:
 * Vec-LUT, arXiv 2512.06443. Here the index is the byte as it lies in the file.)
 *
 * What limits it is loading registers: for 16 columns of a row four entries and the sum itself, and
 * Zen 4 loads 512 bits a cycle. That would be 1.5 times the peak of vpdpbusd; 267 GMAC/s were
 * measured where products reach 228 of 235. The tables of a column of tiles take 20 kB of the first
 * cache, the sums pass through it from the second. Making tables costs as much as a hundred rows.
 *
 * Defined before including: what integer.h wants, and shorts, a register of one 16-bit number for
 * each token, with its functions (zmm.h, ymm.h).
 */
enum {
    LOOKUP_TOKENS = sizeof(bytes) / sizeof(int16_t),
    INDEX_SHIFT = sizeof(bytes) == 64 ? 6 : 5, /* a byte of weights to an offset */
    INDEX_MASK = 255 << INDEX_SHIFT,
    /* Codes leave most lines of a table unused. A distance that is odd in lines spreads the used
     * ones of four tables over the sets of a cache: 270 GMAC/s, and 199 without, on Zen 4. */
    TABLE_BYTES = 256 * sizeof(bytes) + 37 * 64,
    TILE_REACH = BN_TERNARY_TILE_K * 127 /* largest sum of a tile */
};

/* Activations of the 16 columns from q on, tokens in lanes; 0 for tokens that are not there. */
INLINE void lookup_columns(shorts column[16], const int8_t *q, size_t q_stride, size_t tokens) {
    __m128i half[2][16], mixed[16];
    for (size_t h = 0; h < LOOKUP_TOKENS / 16; h++) {
        UNROLL
        for (size_t t = 0; t < 16; t++)
            half[h][t] = 16 * h + t < tokens
                             ? _mm_load_si128((const __m128i *)(q + (16 * h + t) * q_stride))
                             : _mm_setzero_si128();
        for (int round = 0; round < 4; round++) { /* four perfect shuffles transpose 16 by 16 */
            UNROLL
            for (int i = 0; i < 8; i++) {
                mixed[2 * i] = _mm_unpacklo_epi8(half[h][i], half[h][i + 8]);
                mixed[2 * i + 1] = _mm_unpackhi_epi8(half[h][i], half[h][i + 8]);
            }
            memcpy(half[h], mixed, sizeof mixed);
        }
    }
    UNROLL
    for (int k = 0; k < 16; k++)
        column[k] = shorts_widen(half[0][k], half[sizeof(bytes) / 64][k]);
}

/* The table of byte i of a row: entry b has, for the codes c of b, the sum of (c - 1)·column. */
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

/* sum += what the tables say, for one column of tiles. */
static void lookup_rows(shorts *sum, const uint8_t *tile, size_t panel_stride, size_t panels,
                        const uint8_t *table) {
    enum { S = INDEX_SHIFT, AHEAD = 2 * BN_TILE_BYTES };
    for (; panels > 0; panels--, tile += panel_stride) {
        _mm_prefetch((const char *)tile + AHEAD, _MM_HINT_T0);
        UNROLL
        for (int row = 0; row < BN_PANEL; row += 2, sum += 2) {
            uint64_t w; /* of two rows: loads are what is scarce */
            memcpy(&w, tile + 4 * row, sizeof w);
#define ENTRY(i, index)                                                                            \
    (*(const shorts *)(const void *)(table + i * TABLE_BYTES + (index & INDEX_MASK)))
            sum[0] = sum[0] + ENTRY(0, w << S) + ENTRY(1, w >> (8 - S)) + ENTRY(2, w >> (16 - S)) +
                     ENTRY(3, w >> (24 - S));
            sum[1] = sum[1] + ENTRY(0, w >> (32 - S)) + ENTRY(1, w >> (40 - S)) +
                     ENTRY(2, w >> (48 - S)) + ENTRY(3, w >> (56 - S));
#undef ENTRY
        }
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

/* acc of a square of tokens and rows: totals, rows apart by two registers, and Σq to make codes
 * c - 1 those of bn_matmul. */
INLINE void lookup_store(int32_t *acc, size_t acc_stride, const sums *total, sums q_sum,
                         size_t tokens) {
    sums square[VEC_ROWS], mixed[VEC_ROWS];
    UNROLL
    for (int row = 0; row < VEC_ROWS; row++)
        square[row] = sums_add(total[2 * row], q_sum);
    for (int n = VEC_ROWS; n > 1; n /= 2) {
        UNROLL
        for (int i = 0; i < VEC_ROWS / 2; i++) {
            mixed[2 * i] = sums_mix_low(square[i], square[i + VEC_ROWS / 2]);
            mixed[2 * i + 1] = sums_mix_high(square[i], square[i + VEC_ROWS / 2]);
        }
        memcpy(square, mixed, sizeof mixed);
    }
    for (size_t t = 0; t < tokens && t < VEC_ROWS; t++)
        sums_store(acc + t * acc_stride, square[t]);
}

static void ternary_lookup(const bn_matmul *m, void *scratch) {
    const size_t rows = m->panels * BN_PANEL;
    uint8_t *table = scratch;
    shorts *sum = (shorts *)(void *)(table + BN_LOOKUP_TABLES); /* [rows + 1], Σq in the last */
    sums *total = (sums *)(void *)(sum + rows + 1);             /* [rows + 1][2] */
    shorts column[16], reach = {0}; /* reach: Σ|q| since the last fold */
    memset(sum, 0, (rows + 1) * (sizeof *sum + 2 * sizeof *total));
    for (size_t k = 0; k < m->k_tiles; k++) {
        int16_t most = 0;
        for (int t = 0; t < LOOKUP_TOKENS; t++)
            most = reach[t] > most ? reach[t] : most;
        if (most > INT16_MAX - TILE_REACH) {
            lookup_fold(total, sum, rows + 1);
            reach = (shorts){0};
        }
        lookup_columns(column, m->q + k * BN_TERNARY_TILE_K, m->q_stride, m->tokens);
        for (int i = 0; i < 16; i++) {
            sum[rows] += column[i];
            reach += shorts_abs(column[i]);
        }
        for (int i = 0; i < 4; i++)
            lookup_table(table + i * TABLE_BYTES, column, i);
        lookup_rows(sum, m->tiles + k * BN_TILE_BYTES, m->panel_stride, m->panels, table);
    }
    lookup_fold(total, sum, rows + 1);
    for (size_t row = 0; row < rows; row += VEC_ROWS)
        for (size_t half = 0; half < 2 && half * VEC_ROWS < m->tokens; half++)
            lookup_store(m->acc + half * VEC_ROWS * m->acc_stride + row, m->acc_stride,
                         total + 2 * row + half, total[2 * rows + half],
                         m->tokens - half * VEC_ROWS);
}
