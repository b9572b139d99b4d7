/* SPDX-License-Identifier: MIT
 *
 * blocks.h: integer products for many tokens with 16 registers. A panel is unpacked to one byte per
 * weight, 256 columns at a time, into a buffer that stays in the L1 cache; then all tokens are
 * multiplied with it, 16 rows x up to 6 tokens in registers.
 */
#ifndef BITNET_X86_BLOCKS_H
#define BITNET_X86_BLOCKS_H

#include "../groups.h"
#include "integer.h"

enum {
    STEP_K = 4,       /* columns in 32 bits */
    CHUNK_TILES = 16, /* unpacked at a time, at most */
    STEP_BYTES = 64   /* 16 rows, unpacked */
};

typedef sums fold_fn(sums sum);

INLINE void unpack_ternary(uint8_t *w, const bn_matmul *m, size_t offset, size_t tiles) {
    const bytes three = bytes_fill(3);
    for (size_t i = 0; i < tiles; i++) {
        prefetch(m->tiles + offset + i * BN_TILE_BYTES);
        for (size_t half = 0; half < BN_TILE_BYTES; half += sizeof(bytes)) {
            const bytes codes = bytes_load(m->tiles + offset + i * BN_TILE_BYTES + half);
            uint8_t *to = w + 4 * i * STEP_BYTES + half;
            bytes_store(to, bytes_and(codes, three));
            bytes_store(to + STEP_BYTES, bytes_and(bytes_shr(codes, 2), three));
            bytes_store(to + 2 * STEP_BYTES, bytes_and(bytes_shr(codes, 4), three));
            bytes_store(to + 3 * STEP_BYTES, bytes_and(bytes_shr(codes, 6), three));
        }
    }
}

/* acc[t][0..16) (+)= w * q over `steps`, for T <= 6 tokens. */
INLINE void multiply_block(int32_t *acc, size_t acc_stride, const uint8_t *w, const int8_t *q,
                           size_t q_stride, size_t steps, int first, dot_fn *dot, fold_fn *fold,
                           const int T) {
    sums top[6], bottom[6];
#define CLEAR(t) top[t] = bottom[t] = sums_zero();
    EACH_TOKEN(CLEAR)
#undef CLEAR
    for (size_t s = 0; s < steps; s++, w += STEP_BYTES, q += STEP_K) {
        const bytes w_top = bytes_load(w), w_bottom = bytes_load(w + sizeof(bytes));
#define DOT(t)                                                                                     \
    if (t < T) {                                                                                   \
        const bytes x = bytes_spread(q + t * q_stride);                                            \
        top[t] = dot(top[t], w_top, x);                                                            \
        bottom[t] = dot(bottom[t], w_bottom, x);                                                   \
    }
        EACH_TOKEN(DOT)
#undef DOT
    }
#define PUT(t)                                                                                     \
    if (t < T) {                                                                                   \
        int32_t *y = acc + t * acc_stride;                                                         \
        const sums a = fold(top[t]), b = fold(bottom[t]);                                          \
        sums_store(y, first ? a : sums_add(sums_load(y), a));                                      \
        sums_store(y + VEC_ROWS, first ? b : sums_add(sums_load(y + VEC_ROWS), b));                \
    }
    EACH_TOKEN(PUT)
#undef PUT
}

/* At least two tokens, in blocks of nearly equal size, at most `most`. */
INLINE void multiply_tokens(const bn_matmul *m, size_t panel, size_t k, const uint8_t *w,
                            size_t steps, dot_fn *dot, fold_fn *fold, const int most) {
    const size_t blocks = (m->tokens + (size_t)most - 1) / (size_t)most;
    for (size_t b = 0; b < blocks; b++) {
        const size_t t = m->tokens * b / blocks;
        int32_t *acc = m->acc + t * m->acc_stride + panel * BN_PANEL;
        const int8_t *q = m->q + t * m->q_stride + k;
#define BLOCK(T)                                                                                   \
    case T:                                                                                        \
        if (T <= most)                                                                             \
            multiply_block(acc, m->acc_stride, w, q, m->q_stride, steps, k == 0, dot, fold, T);    \
        break
        BY_TOKENS(m->tokens * (b + 1) / blocks - t, BLOCK)
#undef BLOCK
    }
}

INLINE void multiply(const bn_matmul *m, dot_fn *dot, fold_fn *fold, const int most,
                     const size_t chunk_tiles) {
    enum { TILE_STEPS = BN_TERNARY_TILE_K / STEP_K };
    _Alignas(64) uint8_t w[CHUNK_TILES * TILE_STEPS * STEP_BYTES];
    for (size_t p = 0; p < m->panels; p++)
        for (size_t tile = 0; tile < m->k_tiles; tile += chunk_tiles) {
            const size_t tiles = bn_min(chunk_tiles, m->k_tiles - tile);
            unpack_ternary(w, m, p * m->panel_stride + tile * BN_TILE_BYTES, tiles);
            multiply_tokens(m, p, tile * BN_TERNARY_TILE_K, w, tiles * TILE_STEPS, dot, fold, most);
        }
}

/* See groups.h. */
INLINE void add_group(float *y, const int32_t *acc, const int32_t *q_sums, size_t q_sums_stride,
                      const uint16_t *scales, size_t tokens) {
    const vec top = vec_widen(scales), bottom = vec_widen(scales + VEC_ROWS);
    for (; tokens > 0; tokens--, y += BN_PANEL, acc += BN_PANEL, q_sums += q_sums_stride) {
        const sums a = sums_load(acc) - *q_sums, b = sums_load(acc + VEC_ROWS) - *q_sums;
        vec_store(y, vec_fma(vec_from_int(a), top, vec_load(y)));
        vec_store(y + VEC_ROWS, vec_fma(vec_from_int(b), bottom, vec_load(y + VEC_ROWS)));
    }
}

INLINE sums no_fold(sums sum) {
    return sum;
}

#endif
