/* SPDX-License-Identifier: MIT
 *
 * training.h: operations of a training step between matrix products, each in one pass over memory.
 * All tiers compile the same C (training_loops.h), so they give the same bits.
 *
 * Matrices are of `n` columns, n >= 1, rows one behind the other unless a stride is given. A kernel
 * computes rows first to end - 1. bf16 is rounded half to even; NaN stays NaN.
 */
#ifndef BITNET_KERNELS_TRAINING_H
#define BITNET_KERNELS_TRAINING_H

#include <stddef.h>
#include <stdint.h>

/* cffi-begin */

struct bn_matmul;
struct bn_scaling;

/* Floats in fp32, or in bf16 if the other is NULL. */
typedef struct bn_floating {
    float *f32;
    uint16_t *bf16;
} bn_floating;

/* s = 127 / max(max|x|, 1e-5), q = round_half_even(x s). A NaN in x makes s NaN, an infinity makes
 * it 0; codes are then arbitrary. */
typedef struct bn_train_codes {
    int8_t *q;
    float *s; /* [rows] */
    const float *x;
    size_t n;
} bn_train_codes;

/* y = x + amount (q / s - x), q and s as above */
typedef struct bn_train_between {
    bn_floating y;
    const float *x;
    size_t n;
    const float *amount; /* [1]: 0 to 1, which give x and q / s exactly */
} bn_train_between;

/* Sums of |w| rounded to multiples of 2^-32, in these units: exact if below 2^53. */
typedef struct bn_train_magnitudes {
    double *sums; /* [rows] */
    const float *w;
    size_t n;
} bn_train_magnitudes;

/* c = clamp(round_half_even(w / gamma), -1, 1); w finite, gamma >= 1e-5. */
typedef struct bn_train_ternary {
    int8_t *c;
    const float *w, *gamma;
    int gamma_each; /* whether each row has a gamma */
    size_t n;
} bn_train_ternary;

/* y = q / s */
typedef struct bn_train_values {
    bn_floating y;
    const int8_t *q;
    const float *s; /* [rows] */
    size_t n;
} bn_train_values;

/* Ternary codes as tiles of an encoding TERNARY_2BIT (FORMAT.md §4). Columns are padded with code 0
 * to a multiple of BN_TRAIN_COLUMNS. A kernel packs whole panels, of BN_TRAIN_OUTPUTS rows. */
typedef struct bn_train_tiles {
    uint8_t *tiles;
    const int8_t *c;
    size_t n;
} bn_train_tiles;

/* `ternary_scaled` of products.h */
typedef void bn_train_product(const struct bn_matmul *m, const struct bn_scaling *a);

/* y = (float)(sum over columns of c q) * (scale / s), by the engine's product. */
typedef struct bn_train_linear {
    bn_train_product *product;
    float *y;
    const uint8_t *tiles; /* of c, n rows; 64-byte aligned */
    const int8_t *q;      /* [rows][columns], 64-byte aligned */
    size_t columns;       /* a multiple of BN_TRAIN_COLUMNS; q is 0 where c is padded */
    const float *scale;   /* [n] if scale_each, else [1] */
    int scale_each;
    const float *s; /* [rows] */
    size_t n;       /* a multiple of BN_TRAIN_OUTPUTS */
} bn_train_linear;

/* y = (float)sums * (scale / s), in place: y holds the sums, int32, before. */
typedef struct bn_train_scaled {
    float *y;
    const float *scale; /* [n] if scale_each, else [1] */
    int scale_each;
    const float *s; /* [rows] */
    size_t n;
} bn_train_scaled;

/* y = x r gain, r = 1 / sqrt(sum(x²)/n + eps); sums over a row have the lanes and the tree of the
 * float rule (kernels.h), but round each product. */
typedef struct bn_train_norm {
    float *y;
    const float *x, *gain;
    size_t n;
    float eps;
} bn_train_norm;

/* Its gradients: of_x = (grad gain - x (sum(grad gain x)/n) r²) r. of_gain[b] is the sum of grad x
 * r over the rows of block b, in order; a kernel computes whole blocks. */
typedef struct bn_train_norm_back {
    float *of_x, *of_gain; /* of_gain: [ceil(rows / BN_TRAIN_ROWS)][n] */
    const float *grad, *x, *gain;
    size_t n;
    float eps;
} bn_train_norm_back;

/* y = max(gate, 0)² up */
typedef struct bn_train_gate {
    float *y;
    const float *gate, *up;
    size_t n;
} bn_train_gate;

/* Gradients of max(gate, 0)² up: of_gate = 2 grad max(gate, 0) up, of_up = grad max(gate, 0)². */
typedef struct bn_train_gate_back {
    float *of_gate, *of_up;
    const float *grad, *gate, *up;
    size_t n;
} bn_train_gate_back;

/* RoPE: row (b, h, t) of y, n values, is that of x with each pair (i, i + half) turned; values past
 * 2 half are copied. (a, b) becomes (a cos - b sin, b cos + a sin), or its inverse. */
typedef struct bn_train_rotated {
    float *y;
    const float *x;
    size_t x_strides[3];    /* of b, h, t, in floats; a row of x is contiguous */
    const float *cos, *sin; /* [t][half], each b with its own if table_stride is not 0 */
    size_t table_stride;    /* in floats */
    size_t heads, tokens, n, half;
    int inverse;
} bn_train_rotated;

/* Attention weights in bf16 of rows (b, h, t): softmax of scale score + bias. Without bias, token t
 * of a causal mask sees columns 0 to t, otherwise all. */
typedef struct bn_train_softmax {
    uint16_t *p;
    const uint16_t *scores;
    const float *bias;  /* [t][n], or NULL */
    size_t bias_stride; /* of b, in floats: 0 if shared */
    size_t heads, tokens, n;
    float scale;
    int causal;
} bn_train_softmax;

/* loss = log(sum(exp(z))) - z[target], and its gradient by z; both 0 if target < 0. */
typedef struct bn_train_entropy {
    bn_floating of_z;
    float *loss; /* [rows] */
    const float *z;
    const int64_t *targets; /* [rows], below n */
    size_t n;
} bn_train_entropy;

/* BN_TRAIN_ROWS: rows of a block, the unit in which threads take work. BN_TRAIN_OUTPUTS,
 * BN_TRAIN_COLUMNS: see `tiles`. BN_TRAIN_KEYS: most columns of `softmax`. */
enum { BN_TRAIN_ROWS = 64, BN_TRAIN_OUTPUTS = 16, BN_TRAIN_COLUMNS = 64, BN_TRAIN_KEYS = 4096 };

typedef void bn_train_kernel(const void *args, size_t first, size_t end);

typedef struct bn_training_kernels {
    bn_train_kernel *codes, *between, *magnitudes, *ternary, *values, *tiles, *linear, *scaled,
        *norm, *norm_back, *gate, *gate_back, *rotated, *softmax, *entropy;
} bn_training_kernels;

/* cffi-end */

#endif
