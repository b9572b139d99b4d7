/* SPDX-License-Identifier: MIT
 *
 * shapes.h: the sizes that kernels, files and memory agree on.
 */
#ifndef BITNET_KERNELS_SHAPES_H
#define BITNET_KERNELS_SHAPES_H

#include <stddef.h>
#include <stdint.h>

enum {
    BN_LANES = 16,          /* lanes of a float sum; keys of a K tile */
    BN_VALUE_GROUP = 4,     /* adjacent int8 values (of consecutive keys) in a V cache */
    BN_PANEL = 16,          /* rows of a weight panel */
    BN_TILE_BYTES = 64,     /* bytes of a weight tile */
    BN_TERNARY_TILE_K = 16, /* columns of a TERNARY_2BIT tile */
    BN_TRIT_TILE_K = 20,    /* columns of a TERNARY_5TRIT tile */
    BN_TRIT_MAX_K = 32768,  /* most columns of a TERNARY_5TRIT matrix: sums fit 24 bits */
    BN_INT8_MAX_K = 65536,  /* most columns of an INT8_ROWS matrix: sums fit 32 bits */
    BN_MAX_HEAD = 1024,     /* most dimensions of a head (FORMAT.md §2) */
    BN_NIBBLE_GROUP = 32,   /* dimensions of a 4-bit key that share a scale */
    BN_LINE_UNIT = 64,      /* codes in 16 bytes of a line; lines are multiples of BN_TILE_BYTES */
    BN_INT8_UNIT = 64,      /* rows of int8 codes are padded to a multiple of this */
    BN_LIST_MOST = 4096,    /* most lines in one list */
    BN_SCALE_GROUP_K = 128, /* columns that share a scale in scope GROUP */
    BN_GROUP_TILES = BN_SCALE_GROUP_K / BN_TERNARY_TILE_K,
    BN_Q_ALIGN = 64 /* rows of quantized activations are padded to a multiple of this many bytes */
};

static inline size_t bn_min(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t bn_max(size_t a, size_t b) {
    return a > b ? a : b;
}

static inline size_t bn_div_up(size_t n, size_t by) {
    return (n + by - 1) / by;
}

/* The next multiple of `unit`, or n if it is one. */
static inline size_t bn_round_up(size_t n, size_t unit) {
    return bn_div_up(n, unit) * unit;
}

/* Bytes of a row of k quantized activations, zero-padded to whole tiles of any encoding. */
static inline size_t bn_q_row(size_t k) {
    const size_t tiles = (k + BN_TRIT_TILE_K - 1) / BN_TRIT_TILE_K;
    return (tiles * BN_TRIT_TILE_K + BN_Q_ALIGN - 1) / BN_Q_ALIGN * BN_Q_ALIGN;
}

/* 32-bit words of a 4-bit key: one per 8 codes, and one with two scales after each block of up to
 * 64 dimensions. */
static inline size_t bn_nibble_words(size_t head_dim) {
    return (head_dim + 7) / 8 + (head_dim + 2 * BN_NIBBLE_GROUP - 1) / (2 * BN_NIBBLE_GROUP);
}

#endif
