/* SPDX-License-Identifier: MIT
 *
 * kernels.h: everything whose speed depends on the instruction set, as one table.
 *
 * kernels_scalar.c fills every entry and is the specification: a SIMD tier
 * overrides what it does faster and must give the same bits. Kernels take
 * pointers and sizes; they never allocate, lock, log, or know what a layer is.
 * Whoever calls splits the work among threads.
 *
 * The float rule. A sum over n terms is made of 16 lanes: lane j takes the terms
 * j, j+16, j+32, ... by fused multiply-add, in that order, starting at +0; a
 * missing term of the last round counts as 0·0. Then the tree
 *     s[j] += s[j+8] (j<8);  s[j] += s[j+4] (j<4);  s[j] += s[j+2] (j<2);  s[0] + s[1].
 * That is one 512-bit register, two of 256 bits or four of 128. Everything else
 * is element by element, so any vector width gives the same bits.
 */
#ifndef BITNET_KERNELS_H
#define BITNET_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "../floats.h"

enum {
    BN_LANES = 16,          /* terms a float sum advances by; rows of a panel; keys of a K tile */
    BN_PANEL = 16,          /* rows of a weight panel */
    BN_TILE_BYTES = 64,     /* bytes of a weight tile */
    BN_TERNARY_TILE_K = 16, /* columns of a TERNARY_2BIT tile */
    BN_TRIT_TILE_K = 20,    /* columns of a TERNARY_5TRIT tile */
    BN_TRIT_MAX_K = 32768,  /* columns of a TERNARY_5TRIT matrix: sums fit 24 bits */
    BN_LINE_UNIT = 64,      /* codes in 16 bytes of a line, which has whole BN_TILE_BYTES */
    BN_INT8_UNIT = 64,      /* codes that rows of int8 are a multiple of */
    BN_LIST_MOST = 4096,    /* lines listed at a time */
    BN_SCALE_GROUP_K = 128, /* columns that share a scale of scope group */
    BN_GROUP_TILES = BN_SCALE_GROUP_K / BN_TERNARY_TILE_K,
    BN_Q_ALIGN = 64 /* rows of quantized activations are a multiple of this many bytes */
};

/* Bytes of a row of k quantized activations, zero-padded to whole tiles of every encoding. */
static inline size_t bn_q_row(size_t k) {
    const size_t tiles = (k + BN_TRIT_TILE_K - 1) / BN_TRIT_TILE_K;
    return (tiles * BN_TRIT_TILE_K + BN_Q_ALIGN - 1) / BN_Q_ALIGN * BN_Q_ALIGN;
}

/* acc[t * acc_stride + 16 p + r] = sum over k of u(16 p + r, k) * q[t * q_stride + k]
 * with u the unsigned codes as stored (FORMAT.md §4), for k in the tiles given.
 * All sizes >= 1. tiles and q are 64-byte aligned, strides multiples of 64 bytes. */
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

/* acc[t * acc_stride + r] = sum over k of codes[r * row_bytes + k] * q[t * q_stride + k], all of a
 * row. All sizes >= 1. codes and q are 64-byte aligned, row_bytes and q_stride multiples of 64. */
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
} bn_int8_rows;

/* h[i] = act(g[i]) * u[i]; h may be g. */
typedef void bn_gate(float *h, const float *g, const float *u, size_t n);

/* y[t * y_stride + 16 p + r] = sum over groups g of d * scale(16 p + r, g), where d is the sum of
 * (u - 1) * q over the group's 128 columns, exact, then a float (|d| < 2^24). The sum over groups
 * starts at +0 and takes them in order by fused multiply-add: y = fma(d, scale, y).
 * All sizes >= 1. tiles and q are 64-byte aligned, scales 32-byte, q_stride a multiple of 64. */
typedef struct bn_grouped {
    float *y;        /* [tokens][y_stride], y_stride >= 16 panels */
    size_t y_stride; /* in floats */
    const uint8_t *tiles;
    const uint16_t *scales; /* IEEE half, [panels][ceil(k_tiles / 8)][16 rows] */
    size_t panels, k_tiles; /* panels lie one after the other */
    const int8_t *q;        /* as in bn_matmul */
    size_t q_stride;
    const int32_t *q_sums; /* [tokens][q_sums_stride]: of each group, sum of q */
    size_t q_sums_stride;
    size_t tokens;
} bn_grouped;

/* Some lines of a TERNARY_2BIT_ROWS or TERNARY_2BIT_COLUMNS matrix: those listed. n >= 1, codes
 * >= 1. lines is 64-byte aligned, line_bytes a multiple of 64. */
typedef struct bn_lines {
    int32_t *acc;
    const uint8_t *lines;
    size_t line_bytes;
    size_t codes;         /* of each line, from its first */
    const uint32_t *list; /* [n] */
    size_t n;
    const int8_t *q;
} bn_lines;

/* Memory of ternary_lookup for so many rows, 64-byte aligned; all 0 before the first call. */
enum { BN_LOOKUP_TABLES = 4 * (256 * 64 + 37 * 64) };
static inline size_t bn_lookup_bytes(size_t rows) {
    return BN_LOOKUP_TABLES + (rows + 1) * 192;
}

typedef struct bn_kernels {
    const char *isa;

    /* Exact integer products. A code 3, or int8 code -128, of an unverified file
     * counts as such or gives some other finite value: never a fault. */
    void (*ternary_matmul)(const bn_matmul *m);
    /* The same with all four codes, 3 as well. */
    void (*sketch_matmul)(const bn_matmul *m);
    /* The same with tables of sums for most products, for at most lookup_tokens tokens: faster with
     * nearly as many tokens and a thousand rows. scratch: bn_lookup_bytes. */
    void (*ternary_lookup)(const bn_matmul *m, void *scratch);
    /* At most BN_TRIT_MAX_K columns. Every byte has five codes, also one that verify refuses. */
    void (*trit_matmul)(const bn_matmul *m);
    void (*ternary_grouped)(const bn_grouped *m);
    void (*int8_rows)(const bn_int8_rows *m);

    /* acc[i] = sum over k of u(list[i], k) * q[k], q as in bn_matmul. */
    void (*ternary_rows)(const bn_lines *m);
    /* acc[r] += sum over i of u(list[i], r) * q[i]: u(k, r) is that of row r, column k. codes is a
     * multiple of 256, n one of 4 and at most BN_LIST_MOST. */
    void (*ternary_columns)(const bn_lines *m);

    /* y[t * y_stride + r] = sum over k of w[r * cols + k] * x[t * x_stride + k], float rule.
     * rows >= 0, cols >= 1, tokens >= 1; no alignment. f16: IEEE half, widened exactly. */
    void (*f32_matmul)(float *y, size_t y_stride, const float *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens);
    void (*f16_matmul)(float *y, size_t y_stride, const uint16_t *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens);

    /* s = 127 / max(max|x|, 1e-5); q[i] = clamp(round_half_even(x[i] * s), -127, 127);
     * q[n..padded) = 0. Returns s; *sum = sum of q. Where an x is NaN, s is; q then has some
     * value in its range. An infinity makes s 0. x is 4-byte aligned, q 64-byte aligned. */
    float (*quantize)(int8_t *q, int32_t *sum, const float *x, size_t n, size_t padded);

    /* y[i] = (x[i] * r) * gain[i], r = 1 / sqrt(sum(x²)/n + eps), float rule. y may be x.
     * Returns sum(x²), so that the caller sees NaN and infinity. */
    float (*rms_norm)(float *y, const float *x, const float *gain, size_t n, float eps);

    /* Largest of x[0..n), n >= 1; NaN ignored unless all are (then -INFINITY). A largest
     * zero may have either sign. */
    float (*max)(const float *x, size_t n);

    /* x[i] = exp(x[i] - shift); returns the sum, lanes and tree of the float rule (adds). */
    float (*exp_sum)(float *x, size_t n, float shift);

    /* Of the four gates and of exp, NaN gives NaN. */
    bn_gate *relu2_gate; /* (max(g, 0)²) * u */
    bn_gate *silu_gate;  /* (g / (1 + exp(-g))) * u */
    /* GELU with tanh: (g / (1 + exp(-g · fma(C1, g·g, C0)))) * u, as (1 + tanh z)/2 is
     * 1/(1 + exp(-2z)) and z = sqrt(2/pi)·(g + 0.044715·g³) */
    bn_gate *gelu_gate;
    bn_gate *relu_gate; /* max(g, 0) * u */

    /* scores[i * score_stride + 16 t + j] = q_i · key(16 t + j), float rule over head_dim:
     * K tiles lie [tile][head_dim][16 keys], so keys are lanes and nothing is summed across.
     * q: [n_q][head_dim]. n_q, tiles >= 1; head_dim any; k 32-byte (f16) / 64-byte aligned. */
    void (*qk_f16)(float *scores, size_t score_stride, const float *q, size_t n_q,
                   const uint16_t *k, size_t head_dim, size_t tiles);
    void (*qk_f32)(float *scores, size_t score_stride, const float *q, size_t n_q, const float *k,
                   size_t head_dim, size_t tiles);

    /* out[i * head_dim + d] = fma(p[i * p_stride + t], v[t * head_dim + d], out[...]) for t = 0, 1,
     * ... keys - 1 in this order: the caller clears out, and may cut the keys anywhere. */
    void (*pv_f16)(float *out, const float *p, size_t p_stride, size_t n_q, const uint16_t *v,
                   size_t head_dim, size_t keys);
    void (*pv_f32)(float *out, const float *p, size_t p_stride, size_t n_q, const float *v,
                   size_t head_dim, size_t keys);

    /* The same on codes in -127..127 that stand for code · scale, one scale a query, key or value.
     * scores[...] = (float)(sum of q·k, exact) * (q_scale[i] * k_scale[16 t + j]);
     * K tiles lie [tile][ceil(head_dim / 4)][16 keys][4], 64-byte aligned;
     * q: [n_q][bn_q_row(head_dim)], zero past head_dim; head_dim <= 1024, so that the float is
     * exact. pv_int8 leaves the scales of values to p. */
    void (*qk_int8)(float *scores, size_t score_stride, const int8_t *q, const float *q_scale,
                    size_t n_q, const int8_t *k, const float *k_scale, size_t head_dim,
                    size_t tiles);
    void (*pv_int8)(float *out, const float *p, size_t p_stride, size_t n_q, const int8_t *v,
                    size_t head_dim, size_t keys);

    /* IEEE half and back. Narrowing rounds half to even and saturates at ±65504 (so that a
     * cache entry is never infinite); NaN stays NaN. */
    void (*f32_to_f16)(uint16_t *y, const float *x, size_t n);
    void (*f16_to_f32)(float *y, const uint16_t *x, size_t n);

    /* zlib's crc32(crc, p, n): start with 0, result may be fed back. */
    uint32_t (*crc32)(uint32_t crc, const uint8_t *p, size_t n);

    /* The tier's int8 dot-product instruction on registers alone, enough independent
     * chains to saturate it. Returns the multiply-adds done; *sink keeps it alive. */
    uint64_t (*int8_peak)(uint64_t rounds, int32_t *sink);

    size_t lookup_tokens; /* 0: products are as fast */
} bn_kernels;

/* The best table this build and CPU have at or below `isa` (NULL: best). Returns 0 when
 * `isa` names no tier that runs here. */
int bn_kernels_select(bn_kernels *table, const char *isa);

void bn_kernels_scalar(bn_kernels *table);

/* One filler per ISA file: overrides entries in *table and returns 1, or returns 0 when the
 * file was compiled without the ISA's flags. Called only after the CPU was found to have it. */
int bn_kernels_avx2(bn_kernels *table);       /* AVX2, FMA, F16C, PCLMULQDQ */
int bn_kernels_avxvnni(bn_kernels *table);    /* the above and AVX-VNNI */
int bn_kernels_avx512vnni(bn_kernels *table); /* AVX-512 F, BW, DQ, VL, VNNI */
int bn_kernels_neon(bn_kernels *table);       /* AArch64, CRC32 */
int bn_kernels_dotprod(bn_kernels *table);    /* the above and the Armv8.2 dot product */
int bn_kernels_i8mm(bn_kernels *table);       /* the above and the Armv8.6 int8 matrix multiply */

/* exp(x) for one x, the polynomial every tier evaluates (kernels_scalar.c): clamp x to
 * [-86, 88], NaN stays NaN; n = rint(x * log2 e); r = fma(n, -ln2_hi, x); r = fma(n, -ln2_lo, r); a
 * polynomial of degree 6 in r by Horner and fma; times 2^n by adding n to the exponent. */
float bn_exp(float x);

#define BN_EXP_LO (-86.0f)
#define BN_EXP_HI 88.0f
#define BN_LOG2E 1.44269504088896341f
#define BN_LN2_HI 0.693359375f
#define BN_LN2_LO (-2.12194440e-4f)
/* exp(r) = 1 + r + r² (C2 + r (C3 + r (C4 + r (C5 + r C6)))), Taylor: |r| <= ln2/2, 1.2e-7
 * relative. */
#define BN_EXP_C2 0.5f
#define BN_EXP_C3 0.166666672f
#define BN_EXP_C4 0.0416666679f
#define BN_EXP_C5 0.00833333377f
#define BN_EXP_C6 0.00138888892f
#define BN_GELU_C0 1.59576912f   /* 2 sqrt(2/pi) */
#define BN_GELU_C1 0.0713548163f /* 0.044715 of it */

#endif
