/* SPDX-License-Identifier: MIT
 *
 * amx.c: int8 products on AMX tiles, on top of AVX-512. One instruction multiplies up to 16 tokens
 * by 16 rows over 64 columns: the work of 256 AVX-512-VNNI instructions in the time of 32.
 *
 * Four accumulator tiles, 2 token tiles × 2 panels, take turns, because an instruction waits 52
 * cycles for its own accumulator and 16 for a different one. Tiles can only be loaded from memory,
 * so codes pass through a buffer in L1. One core multiplies 3,080 G codes/s from registers and
 * 1,570 in these blocks, some 120 cycles per step instead of 64: activations come from L2, and the
 * sums are loaded and stored for each part of the columns. Slower alternatives on that machine
 * (family 6, model 167, 2 MB of L2, 128 tokens): parts of 14, 20 and 28 steps, 5 to 25 %;
 * prefetching activations one to four steps early, 2 to 7 %; a part of 8 or 16 panels at a time, 5
 * to 9 %; a step's four loads first, or its codes first, 8 %.
 */
#include "../kernels.h"

/* clang 14 names the last macro differently */
#if defined(__AVX512VNNI__) &&                                                                     \
    (defined(__AMX_INT8__) || defined(__AMXINT8__) || defined(BITNET_AMX_IN_C))

#define REGISTER_BITS 512
#include "amx.h"
#include "scale.h"
#include "tile_groups.h"
#include "trits.h"

/* AVX-512-VNNI multiplies up to this many tokens */
enum { FEW = 6, FEW_OF_TRITS = 12, FEW_OF_GROUPS = 8, FEW_OF_ROWS = 4 };
enum { PASS_TOKENS = 128 /* at a time: their activations stay in L2 */ };

/* acc (+)= products of T token tiles and a part of P panels. unpacked: an earlier block has
 * unpacked the codes. */
INLINE void multiply_block(int32_t *acc, size_t acc_stride, const int8_t *q, size_t q_stride,
                           size_t apart, const code_part *w, const int unpacked, const int T,
                           const int P) {
    const size_t row = acc_stride * sizeof *acc;
    int32_t *acc_1 = acc + apart * acc_stride;
    const int8_t *q_1 = q + apart * q_stride;
    const uint8_t *codes = w->codes;
#define SUMS(tile, t, p, how)                                                                      \
    if (t < T && p < P)                                                                            \
        how(tile, (t ? acc_1 : acc) + p * BN_PANEL, row);
#define EACH_SUM(how) SUMS(0, 0, 0, how) SUMS(1, 0, 1, how) SUMS(2, 1, 0, how) SUMS(3, 1, 1, how)
#define CLEAR(tile, at, stride) tile_zero(tile)
    if (w->first_step > 0) {
        EACH_SUM(tile_load)
    } else {
        EACH_SUM(CLEAR)
    }
    for (size_t s = 0; !unpacked && s < bn_min(EARLY, w->n_steps); s++)
        unpack_step(w, s, (size_t)P);
    for (size_t s = 0; s < w->n_steps; s++, codes += PAIR * TILE_SIZE, q += STEP_K, q_1 += STEP_K) {
        if (!unpacked && s + EARLY < w->n_steps)
            unpack_step(w, s + EARLY, (size_t)P);
        multiply_step(q, q_1, q_stride, codes, T, P);
    }
    EACH_SUM(tile_store)
#undef CLEAR
#undef EACH_SUM
#undef SUMS
}

/* row_bytes: bytes of an int8 row, 16 of which form a panel; 0: ternary codes. */
INLINE void multiply_panels(const bn_matmul *m, size_t row_bytes, size_t panel, uint8_t *codes,
                            const int P) {
    const uint8_t *first = m->tiles + panel * m->panel_stride;
    for (size_t i = 0; i < parts_of(m->k_tiles); i++) {
        const code_part w = part_of(first, m->panel_stride, m->k_tiles, row_bytes, i, codes);
        for (size_t b = 0; b < token_blocks(m->tokens); b++) {
            const token_block at = token_block_of(m->tokens, b);
            int32_t *acc = m->acc + at.first * m->acc_stride + panel * BN_PANEL;
            const int8_t *q = m->q + at.first * m->q_stride + w.first_step * STEP_K;
#define BLOCK(unpacked, T)                                                                         \
    multiply_block(acc, m->acc_stride, q, m->q_stride, at.apart, &w, unpacked, T, P)
            if (!at.two)
                BLOCK(0, 1);
            else if (b == 0)
                BLOCK(0, 2);
            else
                BLOCK(1, 2);
#undef BLOCK
        }
    }
}

/* At most PASS_TOKENS tokens. */
static void multiply_tokens(const bn_matmul *m, size_t row_bytes) {
    _Alignas(64) uint8_t codes[CODES_SIZE];
    size_t p = 0;
    tiles_for(m->tokens);
    for (; p + PAIR <= m->panels; p += PAIR)
        multiply_panels(m, row_bytes, p, codes, PAIR);
    if (p < m->panels)
        multiply_panels(m, row_bytes, p, codes, 1);
    tiles_release();
}

static size_t times_of(size_t tokens) {
    return (tokens + PASS_TOKENS - 1) / PASS_TOKENS;
}

/* The tokens of pass i of n. */
static bn_matmul tokens_of(const bn_matmul *m, size_t i, size_t n) {
    const size_t first = m->tokens * i / n;
    bn_matmul some = *m;
    some.acc += first * m->acc_stride;
    some.q += first * m->q_stride;
    some.tokens = m->tokens * (i + 1) / n - first;
    return some;
}

static void multiply_all(const bn_matmul *m, size_t row_bytes) {
    const size_t n = times_of(m->tokens);
    for (size_t i = 0; i < n; i++) {
        const bn_matmul some = tokens_of(m, i, n);
        multiply_tokens(&some, row_bytes);
    }
}

static void ternary_matmul(const bn_matmul *m) {
    if (m->tokens <= FEW)
        bn_avx512vnni.ternary_matmul(m);
    else
        multiply_all(m, 0);
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    const size_t n = times_of(m->tokens);
    if (m->tokens <= FEW) {
        bn_avx512vnni.ternary_scaled(m, a);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const size_t first = m->tokens * i / n;
        const bn_matmul some = tokens_of(m, i, n);
        bn_scaling of = *a;
        of.y += first * a->y_stride;
        of.acc += first * a->acc_stride;
        of.q_sums = a->q_sums ? a->q_sums + first : NULL;
        of.s += first;
        of.tokens = some.tokens;
        multiply_tokens(&some, 0);
        scale_from(&of, 0);
    }
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens <= FEW_OF_TRITS)
        bn_avx512vnni.trit_matmul(m);
    else
        trits_many(m, ternary_matmul);
}

static void ternary_grouped(const bn_grouped *m) {
    const size_t n = times_of(m->tokens);
    if (m->tokens <= FEW_OF_GROUPS) {
        bn_avx512vnni.ternary_grouped(m);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const size_t first = m->tokens * i / n;
        bn_grouped some = *m;
        some.y += first * m->y_stride;
        some.q += first * m->q_stride;
        some.q_sums += first * m->q_sums_stride;
        some.tokens = m->tokens * (i + 1) / n - first;
        group_tokens(&some);
    }
}

/* Rows after the last whole panel go to AVX-512-VNNI. */
static void int8_rows(const bn_int8_rows *m) {
    const size_t rows = m->rows / BN_PANEL * BN_PANEL;
    bn_int8_rows rest = *m;
    if (m->list || m->tokens <= FEW_OF_ROWS || rows == 0) {
        bn_avx512vnni.int8_rows(m);
        return;
    }
    const bn_matmul all = {.acc = m->acc,
                           .acc_stride = m->acc_stride,
                           .tiles = (const uint8_t *)m->codes,
                           .panel_stride = BN_PANEL * m->row_bytes,
                           .panels = rows / BN_PANEL,
                           .k_tiles = m->row_bytes / BN_TERNARY_TILE_K,
                           .q = m->q,
                           .q_stride = m->q_stride,
                           .tokens = m->tokens};
    multiply_all(&all, m->row_bytes);
    rest.acc += rows;
    rest.codes += rows * m->row_bytes;
    rest.rows -= rows;
    if (rest.rows > 0)
        bn_avx512vnni.int8_rows(&rest);
}

/* Four accumulators in turn, as in multiply_block; a round takes about as long as in other
 * tiers. */
static uint64_t int8_peak(uint64_t rounds, int32_t *sink) {
    static const uint8_t some[TILE_SIZE] = {1, 2, 3};
    _Alignas(64) int32_t sums_of[TILE_SIZE / sizeof(int32_t)];
    const uint8_t all = TILE_ROWS;
    tiles_configure((const uint8_t[TILE_REGISTERS]){all, all, all, all, all, all, all, all});
    tile_load(4, some, TILE_COLUMNS);
    tile_load(6, some, TILE_COLUMNS);
    const uint64_t turns = (rounds + 7) / 8;
    for (uint64_t i = 0; i < turns; i++) {
        tile_dot(0, 4, 6);
        tile_dot(1, 4, 6);
        tile_dot(2, 4, 6);
        tile_dot(3, 4, 6);
    }
    tile_store(0, sums_of, TILE_COLUMNS);
    tiles_release();
    *sink = sums_of[0];
    return turns * 4 * TILE_ROWS * TILE_SIZE;
}

int bn_kernels_amx(bn_kernels *table) {
    table->products.ternary_matmul = ternary_matmul;
    table->products.ternary_scaled = ternary_scaled;
    table->products.sketch_matmul = ternary_matmul;
    table->products.trit_matmul = trit_matmul;
    table->products.ternary_grouped = ternary_grouped;
    table->products.int8_rows = int8_rows;
    table->products.int8_peak = int8_peak;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_amx)
#endif
