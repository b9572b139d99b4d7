/* SPDX-License-Identifier: MIT
 *
 * amx.c: int8 products on AMX tiles, on top of AVX-512. One instruction multiplies up to 16 tokens
 * by 16 rows over 64 columns: the work of 256 AVX-512-VNNI instructions in the time of 32.
 *
 * Four accumulator tiles, 2 token tiles × 2 panels, take turns, because an instruction waits 52
 * cycles for its own accumulator and 16 for a different one. They stay in registers for all
 * columns. Tiles can only be loaded from memory, so codes pass through a ring in L1, which is
 * small, so that its stores always hit; activations come from L2.
 *
 * One core multiplies 3,100 G codes/s from registers and 1,590 here: some 125 cycles per step
 * instead of 64. Of these, loading tiles costs about 13 with codes that are not zero, unpacking 15
 * to 30, and the ends of a block the rest. Slower on that machine (family 6, model 167, 2 MB of L2;
 * 128 tokens, 2560 columns):
 *   1,200: unpacking 10 steps at once for all tokens, sums kept in L2 meanwhile
 *     950: 20 steps or more at once: a store to codes that have left L1 takes 10 cycles
 *   1,100: prefetching activations into L1 one to four steps early
 *   1,210: no tile stored within a block (tile_codes.h, STRETCH)
 * Writing a block's 64 registers of outputs takes some 220 cycles, and 450 where the rows of y lie
 * a power of two apart (workspace.h): at 512 columns a fifth and a third of all. Unpacking 5 steps
 * early instead of 3 changes nothing, nor does beginning with the next block's codes at the end of
 * this one, nor three token tiles at once with six accumulators.
 */
#include "../kernels.h"

/* clang 14 names the last macro differently */
#if defined(__AVX512VNNI__) &&                                                                     \
    (defined(__AMX_INT8__) || defined(__AMXINT8__) || defined(BITNET_AMX_IN_C))

#define REGISTER_BITS 512
#include "amx.h"
#include "scale.h"
#include "tile_cache.h"
#include "tile_groups.h"
#include "trits.h"

/* AVX-512-VNNI multiplies up to this many tokens, or queries. With three tokens it is as fast from
 * a cache, and faster from memory. */
enum { FEW = 3, FEW_OF_TRITS = 8, FEW_OF_GROUPS = 3, FEW_OF_ROWS = 4, FEW_QUERIES = 4 };

/* Writes a panel's sums of the tokens of a tile: to acc or, unless `to` is NULL, scaled. */
INLINE void put_tile(const bn_matmul *m, const bn_scaling *to, size_t token, size_t tokens,
                     size_t panel, int32_t (*sums_of)[BN_PANEL]) {
    if (to) {
        scale_tile(to, token, tokens, panel * BN_PANEL, *sums_of);
    } else {
        int32_t *acc = m->acc + token * m->acc_stride + panel * BN_PANEL;
        for (size_t t = 0; t < tokens; t++)
            sums_store(acc + t * m->acc_stride, sums_load(sums_of[t]));
    }
}

/* T token tiles times P panels, all columns. */
INLINE void multiply_block(const bn_matmul *m, const bn_scaling *to, const code_panels *all,
                           const token_block *at, size_t panel, size_t share, uint8_t *ring,
                           const code_kind kind, const int T, const int P) {
    const size_t size = tile_tokens(m->tokens);
    const int8_t *q = m->q + at->first * m->q_stride;
    code_source w = source_of(all, panel, ring, share, token_blocks(m->tokens), P);
    _Alignas(64) block_sums sums_of;
    if (to)
        will_write(&w, to->y + at->first * to->y_stride + panel * BN_PANEL, to->y_stride,
                   at->apart + size);
    start_unpacking(&w, kind, P);
    clear_sums();
    multiply_steps(&w, 0, w.steps, q, q + at->apart * m->q_stride, m->q_stride, kind, T, P);
    store_sums(sums_of, T, P);
    const size_t known = size - at->apart; /* tokens of the second tile that the first has, too */
    for (size_t p = 0; p < (size_t)P; p++) {
        put_tile(m, to, at->first, size, panel + p, sums_of[0][p]);
        if (T > 1)
            put_tile(m, to, at->first + size, size - known, panel + p, sums_of[1][p] + known);
    }
}

/* The product: sums in acc or, unless `to` is NULL, scaled outputs. */
INLINE void multiply(const bn_matmul *m, const bn_scaling *to, const code_kind kind) {
    const code_panels all = {m->tiles, m->panel_stride, m->panels, m->k_tiles};
    _Alignas(64) uint8_t ring[RING_AND_SPARE];
    tiles_for(m->tokens);
    for (size_t b = 0; b < token_blocks(m->tokens); b++) {
        const token_block at = token_block_of(m->tokens, b);
        for (size_t p = 0; p < m->panels; p += PAIR) {
#define BLOCK(T, P) multiply_block(m, to, &all, &at, p, b, ring, kind, T, P)
            EACH_SHAPE(BLOCK, at.two, p + PAIR <= m->panels)
#undef BLOCK
        }
    }
    tiles_release();
}

static void ternary_matmul(const bn_matmul *m) {
    if (m->tokens <= FEW)
        bn_avx512vnni.ternary_matmul(m);
    else
        multiply(m, NULL, TERNARY_CODES);
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    if (m->tokens <= FEW)
        bn_avx512vnni.ternary_scaled(m, a);
    else
        multiply(m, a, TERNARY_CODES);
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens <= FEW_OF_TRITS)
        bn_avx512vnni.trit_matmul(m);
    else
        trits_many(m, ternary_matmul);
}

static void ternary_grouped(const bn_grouped *m) {
    if (m->tokens <= FEW_OF_GROUPS)
        bn_avx512vnni.ternary_grouped(m);
    else
        group_tokens(m);
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
    multiply(&all, NULL, INT8_ROWS);
    rest.acc += rows;
    rest.codes += rows * m->row_bytes;
    rest.rows -= rows;
    if (rest.rows > 0)
        bn_avx512vnni.int8_rows(&rest);
}

static void qk_int8(const bn_qk *a) {
    if (a->n_q <= FEW_QUERIES || a->head_dim % STEP_K != 0)
        bn_avx512vnni_int8.qk(a);
    else
        qk_tiles(a);
}

/* Keys after the last 64 go to AVX-512-VNNI. */
static void pv_int8(const bn_pv *a) {
    bn_pv whole = *a, rest = *a;
    whole.keys = a->keys / TILE_COLUMNS * TILE_COLUMNS;
    if (a->n_q <= FEW_QUERIES || a->head_dim % STEP_K != 0)
        whole.keys = 0;
    if (whole.keys > 0)
        pv_tiles(&whole);
    rest.v = (const int8_t *)a->v + whole.keys * a->head_dim;
    rest.codes += 2 * whole.keys;
    rest.keys -= whole.keys;
    if (rest.keys > 0)
        bn_avx512vnni_int8.pv(&rest);
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
    table->attention[BN_KV_INT8].qk = qk_int8;
    table->attention[BN_KV_INT8].pv = pv_int8;
    table->attention[BN_KV_K4V8].pv = pv_int8;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_amx)
#endif
