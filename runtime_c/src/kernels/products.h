/* SPDX-License-Identifier: MIT
 *
 * products.h: matrix-vector products, where nearly all time is spent: exact integer products of
 * quantized activations with ternary or int8 weights, and float products.
 */
#ifndef BITNET_KERNELS_PRODUCTS_H
#define BITNET_KERNELS_PRODUCTS_H

#include "shapes.h"

/* acc[t * acc_stride + 16 p + r] = sum over k of u(16 p + r, k) * q[t * q_stride + k] where u are
 * the unsigned codes as stored (FORMAT.md §4) and k runs over the given tiles. All sizes >= 1.
 * tiles and q are 64-byte aligned, strides multiples of 64 bytes. */
typedef struct bn_matmul {
    int32_t *acc;         /* [tokens][acc_stride], acc_stride >= 16 panels */
    size_t acc_stride;    /* in int32 */
    const uint8_t *tiles; /* first tile of the first panel */
    size_t panel_stride;  /* bytes from one panel to the next */
    size_t panels;
    size_t k_tiles;  /* tiles along K */
    const int8_t *q; /* [tokens][q_stride], each in -127..127, zero past K to bn_q_row */
    size_t q_stride;
    size_t tokens;
} bn_matmul;

/* Converts integer sums of a product to floats, for outputs i < n of each token t:
 * v = (float)(acc[t * acc_stride + i] - q_sums[t]) * (scale / s[t]), plus bias[i];
 * y[t * y_stride + i] = v, or y[t * y_stride + i] += v * weight. Where it does not accumulate, y
 * may take the place of acc, with the same stride. */
typedef struct bn_scaling {
    float *y;              /* [tokens][y_stride] */
    size_t y_stride;       /* in floats */
    const int32_t *acc;    /* [tokens][acc_stride] */
    size_t acc_stride;     /* in int32 */
    const int32_t *q_sums; /* [tokens] sum of q, if codes are stored plus one; NULL: 0 */
    const float *s;        /* [tokens] scales of the activations */
    const float *scales;   /* scales of the weights */
    int32_t scale_each;    /* scales has one entry per output, [n]; otherwise [1] */
    int32_t accumulate;
    const float *bias; /* [n], or NULL */
    float weight;
    size_t n, tokens;
} bn_scaling;

/* acc[t * acc_stride + r] = sum over k of codes[r * row_bytes + k] * q[t * q_stride + k] over the
 * whole row. With a list, row list[r] replaces row r, and tokens is 1. All sizes >= 1. codes and q
 * are 64-byte aligned, row_bytes and q_stride multiples of 64. */
typedef struct bn_int8_rows {
    int32_t *acc;      /* [tokens][acc_stride], acc_stride >= rows */
    size_t acc_stride; /* in int32 */
    const int8_t *codes;
    size_t row_bytes;
    size_t rows;
    const int8_t *q; /* as in bn_matmul */
    size_t q_stride;
    const int32_t *q_sums; /* [tokens] sum of q */
    size_t tokens;
    const uint32_t *list; /* [rows], or NULL */
} bn_int8_rows;

static inline const int8_t *bn_int8_row_at(const bn_int8_rows *m, size_t r) {
    return m->codes + (m->list ? m->list[r] : r) * m->row_bytes;
}

/* y[t * y_stride + 16 p + r] = sum over groups g of d * scale(16 p + r, g), where d is the exact
 * integer sum of (u - 1) * q over the group's 128 columns, converted to float (|d| < 2^24). The sum
 * over groups starts at +0 and takes them in order by fused multiply-add: y = fma(d, scale, y). All
 * sizes >= 1. tiles and q are 64-byte aligned, scales 32-byte, q_stride a multiple of 64. */
typedef struct bn_grouped {
    float *y;        /* [tokens][y_stride], y_stride >= 16 panels */
    size_t y_stride; /* in floats */
    const uint8_t *tiles;
    const uint16_t *scales; /* IEEE half, [panels][ceil(k_tiles / 8)][16 rows] */
    size_t panels, k_tiles; /* panels are contiguous */
    const int8_t *q;        /* as in bn_matmul */
    size_t q_stride;
    const int32_t *q_sums; /* [tokens][q_sums_stride]: sum of q of each group */
    size_t q_sums_stride;
    size_t tokens;
} bn_grouped;

/* The listed lines of a TERNARY_2BIT_ROWS or TERNARY_2BIT_COLUMNS matrix. n >= 1, codes >= 1. lines
 * is 64-byte aligned, line_bytes a multiple of 64. */
typedef struct bn_lines {
    int32_t *acc;
    const uint8_t *lines;
    size_t line_bytes;
    size_t codes;         /* leading codes to use of each line */
    const uint32_t *list; /* [n] */
    size_t n;
    const int8_t *q;
} bn_lines;

/* Bytes of scratch that ternary_lookup needs for `rows` rows, a multiple of 64; 64-byte aligned,
 * zeroed before the first call. */
enum { BN_LOOKUP_TABLES = 4 * (256 * 64 + 37 * 64) };
static inline size_t bn_lookup_bytes(size_t rows) {
    return BN_LOOKUP_TABLES + (rows + 1) * 192;
}

/* Adds a weighted sum of matrix rows to y:
 * s = +0; s = fma((float)w[r * w_stride + i], x[t * x_stride + r], s) for r in order;
 * y[t * y_stride + i] += s * weight, rounded twice. All sizes >= 1. w is 64-byte aligned, w_stride
 * a multiple of 64. */
typedef struct bn_add_rows {
    float *y;        /* [tokens][y_stride], y_stride >= n */
    size_t y_stride; /* in floats */
    const int8_t *w; /* [rank][w_stride], w_stride >= n */
    size_t w_stride;
    size_t rank;     /* rows */
    const float *x;  /* [tokens][x_stride], x_stride >= rank */
    size_t x_stride; /* in floats */
    float weight;
    size_t n, tokens;
} bn_add_rows;

typedef struct bn_product_kernels {
    /* Exact integer products. A code 3, or int8 code -128, in an unverified file is taken at face
     * value or gives some other finite result, but never a fault. */
    void (*ternary_matmul)(const bn_matmul *m);
    /* ternary_matmul followed by scale_sums; `a` has the same acc and tokens, and n <= 16 * panels.
     * acc is scratch and does not overlap y. */
    void (*ternary_scaled)(const bn_matmul *m, const bn_scaling *a);
    /* ternary_matmul for codes 0 to 3, all of them valid. */
    void (*sketch_matmul)(const bn_matmul *m);
    /* ternary_matmul by lookup tables of partial sums, for at most lookup_tokens tokens: faster
     * with nearly that many tokens and a thousand rows. scratch has bn_lookup_bytes(rows). */
    void (*ternary_lookup)(const bn_matmul *m, void *scratch);
    /* At most BN_TRIT_MAX_K columns. Every byte decodes to five codes, even one that verify
     * refuses. */
    void (*trit_matmul)(const bn_matmul *m);
    void (*ternary_grouped)(const bn_grouped *m);
    void (*int8_rows)(const bn_int8_rows *m);

    /* acc[i] = sum over k of u(list[i], k) * q[k], q as in bn_matmul. */
    void (*ternary_rows)(const bn_lines *m);
    /* acc[r] += sum over i of u(list[i], r) * q[i]: u(k, r) is the code at row r, column k. codes
     * is a multiple of 256; n is a multiple of 4 and at most BN_LIST_MOST. */
    void (*ternary_columns)(const bn_lines *m);

    /* y[t * y_stride + r] = sum over k of w[r * cols + k] * x[t * x_stride + k], float rule.
     * rows >= 0, cols >= 1, tokens >= 1; no alignment. f16: IEEE half, widened exactly. */
    void (*f32_matmul)(float *y, size_t y_stride, const float *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens);
    void (*f16_matmul)(float *y, size_t y_stride, const uint16_t *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens);

    void (*int8_add_rows)(const bn_add_rows *a);

    /* Benchmark: runs the tier's int8 dot-product instruction on registers only, with enough
     * independent chains to saturate it. Returns the number of multiply-adds; *sink keeps the loop
     * from being optimized away. */
    uint64_t (*int8_peak)(uint64_t rounds, int32_t *sink);

    size_t lookup_tokens; /* most tokens of a ternary_lookup call; 0: not available */
    size_t lookup_rows;   /* with fewer rows ternary_scaled is as fast; SIZE_MAX: it always is */
    size_t lookup_cols;   /* the same for columns, which amortize the work per output */
} bn_product_kernels;

#endif
