/* SPDX-License-Identifier: MIT
 *
 * avxvnni.c: AVX-VNNI, the 256-bit form of vpdpbusd on CPUs without AVX-512; on top of
 * AVX2. A register is eight rows of a weight tile.
 *
 * With BITNET_AVXVNNI_AS_EVEX the same code uses the AVX-512VL form of the instruction, so that
 * it can be tested where only that one exists.
 */
#include "../kernels.h"

#if defined(__AVX2__) &&                                                                           \
    (defined(__AVXVNNI__) || (defined(BITNET_AVXVNNI_AS_EVEX) && defined(__AVX512VNNI__)))

#include "ymm.h"

INLINE sums sums_dot(sums sum, bytes w, bytes q) {
#if defined(BITNET_AVXVNNI_AS_EVEX)
    return (sums)_mm256_dpbusd_epi32((__m256i)sum, w, q);
#else
    return (sums)_mm256_dpbusd_avx_epi32((__m256i)sum, w, q);
#endif
}

#define STREAM_TOKENS 3 /* 12 sums, the tile, a field and the activations: 15 of 16 registers */
#include "stream.h"

#include "blocks.h"

#include "rows.h"

#define PRODUCT_ROWS 6
#define PRODUCT_TILES 1
#include "lookup.h"

#include "grouped.h"

#define TRIT_BYTES sizeof(bytes)
#include "../trits.h"
#include "int8_cache.h"
#include "trit_stream.h"

#define LINE_SUMS 2
#include "lines.h"

/* One linear stream; the halves of a tile keep four sums each, enough to hide the latency. */
static void ternary_vector(const bn_matmul *m) {
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *tile = m->tiles + p * m->panel_stride;
        sums top[4] = {sums_zero(), sums_zero(), sums_zero(), sums_zero()};
        sums bottom[4] = {sums_zero(), sums_zero(), sums_zero(), sums_zero()};
        for (size_t k = 0; k < m->k_tiles; k++, tile += BN_TILE_BYTES) {
            ternary_fields(top, tile, m->q + k * BN_TERNARY_TILE_K);
            ternary_fields(bottom, tile + sizeof(bytes), m->q + k * BN_TERNARY_TILE_K);
        }
        sums_store(m->acc + p * BN_PANEL, ternary_total(top));
        sums_store(m->acc + p * BN_PANEL + VEC_ROWS, ternary_total(bottom));
    }
}

static void ternary_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        ternary_vector(m);
    else if (m->tokens <= STREAM_TOKENS)
        stream_tokens(m);
    else
        multiply(m, sums_dot, no_fold, 6, CHUNK_TILES);
}

static void ternary_grouped(const bn_grouped *m) {
    if (m->tokens == 1)
        grouped_vector(m);
    else
        grouped_by(m, ternary_matmul, add_group);
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens <= STREAM_TOKENS)
        trit_few(m);
    else
        trits_many(m, ternary_matmul);
}

static void int8_rows(const bn_int8_rows *m) {
    rows_all(m, sums_dot);
}

static void qk_int8(const bn_qk *a) {
    qk_int8_all(a, sums_dot);
}

int bn_kernels_avxvnni(bn_kernels *table) {
    table->products.ternary_matmul = ternary_matmul;
    table->products.sketch_matmul = ternary_matmul;
    table->products.ternary_lookup = ternary_lookup;
    table->products.lookup_tokens = LOOKUP_TOKENS;
    table->products.trit_matmul = trit_matmul;
    table->products.ternary_grouped = ternary_grouped;
    table->products.int8_rows = int8_rows;
    table->products.ternary_rows = ternary_rows;
    table->products.ternary_columns = ternary_columns;
    table->attention[BN_KV_INT8].qk = qk_int8;
    table->products.int8_peak = int8_peak;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_avxvnni)
#endif
