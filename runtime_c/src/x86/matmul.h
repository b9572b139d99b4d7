/* SPDX-License-Identifier: MIT
 *
 * matmul.h: integer products for many tokens, the same for every x86 tier.
 *
 * Weights are unpacked once to one byte each, 256 columns of a group of panels at a time, into
 * a buffer that stays in the L1 cache; then every token is multiplied with it, in blocks of
 * rows x tokens that fill the register file. So a weight is read from memory once and unpacked
 * once, and the inner loop is loads and multiplies only.
 *
 * Defined before including: GROUP (panels), VEC_ROWS (rows of a register), bytes (a register of
 * four columns for each row), sums (one of a 32-bit sum for each row), and the bytes_ and sums_
 * functions used here (zmm.h, ymm.h); INT8_FLIP.
 */
#include "common.h"

enum {
    STEP_K = 4,                  /* columns in 32 bits */
    CHUNK_STEPS = 64,            /* 256 columns; also what int16 sums of maddubs hold (AVX2) */
    GROUP_BYTES = 64 * GROUP,    /* one step of a group, unpacked */
    VECS = 16 * GROUP / VEC_ROWS /* registers of a group */
};

/* One register of the two planes to bytes: columns 0-3 and columns 4-7. INT8_FLIP is 0 for the
 * codes u as stored, 0x80 for c = u - 128. */
INLINE void int8_bytes(bytes u[2], const uint8_t *high, const uint8_t *low) {
    bytes h = bytes_load(high), l = bytes_load(low), top = bytes_fill(0xf0);
    u[0] = bytes_xor(bytes_select(top, bytes_shl(h, 4), l), bytes_fill(INT8_FLIP));
    u[1] = bytes_xor(bytes_select(top, h, bytes_shr(l, 4)), bytes_fill(INT8_FLIP));
}

INLINE void unpack_ternary(uint8_t *w, const bn_matmul *m, size_t offset, size_t tiles) {
    const bytes three = bytes_fill(3);
    for (size_t i = 0; i < tiles; i++)
        for (size_t half = 0; half < BN_TILE_BYTES; half += sizeof(bytes)) {
            bytes codes = bytes_load(m->tiles + offset + i * BN_TILE_BYTES + half);
            uint8_t *to = w + 4 * i * GROUP_BYTES + half;
            bytes_store(to, bytes_and(codes, three));
            bytes_store(to + GROUP_BYTES, bytes_and(bytes_shr(codes, 2), three));
            bytes_store(to + 2 * GROUP_BYTES, bytes_and(bytes_shr(codes, 4), three));
            bytes_store(to + 3 * GROUP_BYTES, bytes_and(bytes_shr(codes, 6), three));
        }
}

INLINE void unpack_int8(uint8_t *w, const bn_matmul *m, size_t offset, size_t tiles) {
    for (size_t i = 0; i < tiles; i++)
        for (size_t half = 0; half < BN_TILE_BYTES; half += sizeof(bytes)) {
            bytes u[2];
            size_t at = offset + i * BN_TILE_BYTES + half;
            int8_bytes(u, m->tiles + at, m->low + at);
            bytes_store(w + 2 * i * GROUP_BYTES + half, u[0]);
            bytes_store(w + (2 * i + 1) * GROUP_BYTES + half, u[1]);
        }
}

typedef void unpack_fn(uint8_t *w, const bn_matmul *m, size_t offset, size_t tiles);
typedef sums dot_fn(sums sum, bytes w, bytes q);
typedef sums fold_fn(sums sum);

/* X for each token and register of a block. Loops would do, but compilers keep the sums in
 * memory when they unroll after deciding what lives in registers. */
#define EACH_VEC(X, t) X(t, 0) X(t, 1) X(t, 2) X(t, 3)
#define EACH_TOKEN(X) X(0) X(1) X(2) X(3) X(4) X(5)

/* acc[t][row] (+)= w * q over `steps`, for T <= 6 tokens and the rows of R <= 4 registers. */
INLINE void multiply_block(int32_t *acc, size_t acc_stride, const uint8_t *w, const int8_t *q,
                           size_t q_stride, size_t steps, int first, dot_fn *dot, fold_fn *fold,
                           const int R, const int T) {
    sums sum[6][4];
    bytes rows[4];
#define CLEAR(t, r) sum[t][r] = sums_zero();
#define CLEAR_TOKEN(t) EACH_VEC(CLEAR, t)
    EACH_TOKEN(CLEAR_TOKEN)

    for (size_t s = 0; s < steps; s++, w += GROUP_BYTES, q += STEP_K) {
#define LOAD(t, r)                                                                                 \
    if (r < R)                                                                                     \
        rows[r] = bytes_load(w + r * sizeof(bytes));
#define DOT(t, r)                                                                                  \
    if (r < R)                                                                                     \
        sum[t][r] = dot(sum[t][r], rows[r], x);
#define DOT_TOKEN(t)                                                                               \
    if (t < T) {                                                                                   \
        const bytes x = bytes_spread(q + t * q_stride);                                            \
        EACH_VEC(DOT, t)                                                                           \
    }
        EACH_VEC(LOAD, 0)
        EACH_TOKEN(DOT_TOKEN)
    }

#define PUT(t, r)                                                                                  \
    if (t < T && r < R) {                                                                          \
        int32_t *y = acc + t * acc_stride + r * VEC_ROWS;                                          \
        const sums total = fold(sum[t][r]);                                                        \
        sums_store(y, first ? total : sums_add(sums_load(y), total));                              \
    }
#define PUT_TOKEN(t) EACH_VEC(PUT, t)
    EACH_TOKEN(PUT_TOKEN)
}

/* All tokens, in blocks of 2 to `most` whose sizes differ by at most one. */
INLINE void multiply_tokens(const bn_matmul *m, size_t panel, size_t k, const uint8_t *w,
                            size_t steps, dot_fn *dot, fold_fn *fold, const int R, const int most) {
    size_t blocks = (m->tokens + (size_t)most - 1) / (size_t)most;
    for (size_t b = 0; b < blocks; b++) {
        size_t t = m->tokens * b / blocks;
        int32_t *acc = m->acc + t * m->acc_stride + panel * BN_PANEL;
        const int8_t *q = m->q + t * m->q_stride + k;
#define BLOCK(T)                                                                                   \
    case T:                                                                                        \
        multiply_block(acc, m->acc_stride, w, q, m->q_stride, steps, k == 0, dot, fold, R, T);     \
        break
        switch (m->tokens * (b + 1) / blocks - t) {
            BLOCK(2);
            BLOCK(3);
            BLOCK(4);
            BLOCK(5);
        default:
            multiply_block(acc, m->acc_stride, w, q, m->q_stride, steps, k == 0, dot, fold, R,
                           most);
        }
#undef BLOCK
    }
}

INLINE void multiply(const bn_matmul *m, size_t tile_k, unpack_fn *unpack, dot_fn *dot,
                     fold_fn *fold, const int most) {
    _Alignas(64) uint8_t w[CHUNK_STEPS * GROUP_BYTES];
    const size_t chunk = CHUNK_STEPS * STEP_K / tile_k;
    for (size_t p = 0; p < m->panels; p += GROUP) {
        size_t panels = min_size(GROUP, m->panels - p);
        for (size_t tile = 0; tile < m->k_tiles; tile += chunk) {
            size_t tiles = min_size(chunk, m->k_tiles - tile);
            for (size_t i = 0; i < panels; i++)
                unpack(w + i * BN_TILE_BYTES, m, (p + i) * m->panel_stride + tile * BN_TILE_BYTES,
                       tiles);
            size_t k = tile * tile_k, steps = tiles * tile_k / STEP_K;
            switch (panels) {
#if GROUP > 1
            case 1:
                multiply_tokens(m, p, k, w, steps, dot, fold, VECS / GROUP, most);
                break;
            case 2:
                multiply_tokens(m, p, k, w, steps, dot, fold, 2 * VECS / GROUP, most);
                break;
            case 3:
                multiply_tokens(m, p, k, w, steps, dot, fold, 3 * VECS / GROUP, most);
                break;
#endif
            default:
                multiply_tokens(m, p, k, w, steps, dot, fold, VECS, most);
            }
        }
    }
}

/* Independent dot products on registers alone; the empty asm keeps the compiler from solving it. */
INLINE uint64_t peak(uint64_t rounds, int32_t *sink, dot_fn *dot) {
    enum { CHAINS = 12 };
    sums sum[CHAINS];
    bytes w = bytes_fill(1), q = bytes_fill(2);
    UNROLL
    for (int i = 0; i < CHAINS; i++)
        sum[i] = sums_zero();
    for (uint64_t n = 0; n < rounds; n++) {
        UNROLL
        for (int i = 0; i < CHAINS; i++) {
            sum[i] = dot(sum[i], w, q);
            __asm__ volatile("" : "+v"(sum[i]));
        }
    }
    int32_t lanes[VEC_ROWS];
    UNROLL
    for (int i = 1; i < CHAINS; i++)
        sum[0] = sums_add(sum[0], sum[i]);
    sums_store(lanes, sum[0]);
    *sink = lanes[0];
    return rounds * CHAINS * sizeof(bytes);
}
