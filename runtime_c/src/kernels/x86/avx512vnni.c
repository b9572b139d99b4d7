/* SPDX-License-Identifier: MIT
 *
 * avx512vnni.c: AVX-512 F, BW, DQ, VL and VNNI. A register is a weight tile, and the
 * 16 lanes of the float rule.
 */
#include "../kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) &&                      \
    defined(__AVX512VL__) && defined(__AVX512VNNI__)

#include "zmm.h"

INLINE sums sums_dot(sums sum, bytes w, bytes q) {
    return (sums)_mm512_dpbusd_epi32((__m512i)sum, w, q);
}

#define STREAM_TOKENS 6 /* 24 sums, 4 masks, the tile and a field: 30 of 32 registers */
#include "attention.h"
#include "stream.h"

#include "rows.h"

#define PRODUCT_ROWS 6
#define PRODUCT_TILES 2
#include "lookup.h"

#include "grouped.h"

/* sum + power where s >= least */
INLINE bytes add_where(bytes sum, bytes s, int least, int power) {
    return _mm512_mask_add_epi8(sum, _mm512_cmpge_epi8_mask(s, bytes_fill(least)), sum,
                                bytes_fill(power));
}

#define TRIT_BYTES sizeof(bytes)
#define TRITS_ADD_CODES(sum, s, power)                                                             \
    (octets)                                                                                       \
        add_where(add_where((bytes)(sum), (bytes)(s), TRIT_1, power), (bytes)(s), TRIT_2, power)
#include "../trits.h"
#include "int8_cache.h"
#include "trit_stream.h"

#define LINE_SUMS 4
#include "lines.h"

/* One linear stream; two tiles at a time, so that eight sums hide the latency. */
static void ternary_vector(const bn_matmul *m) {
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *tile = m->tiles + p * m->panel_stride;
        sums even[4] = {sums_zero(), sums_zero(), sums_zero(), sums_zero()};
        sums odd[4] = {sums_zero(), sums_zero(), sums_zero(), sums_zero()};
        size_t k = 0;
        for (; k + 2 <= m->k_tiles; k += 2) {
            ternary_fields(even, tile + k * BN_TILE_BYTES, m->q + k * BN_TERNARY_TILE_K);
            ternary_fields(odd, tile + (k + 1) * BN_TILE_BYTES, m->q + (k + 1) * BN_TERNARY_TILE_K);
        }
        if (k < m->k_tiles)
            ternary_fields(even, tile + k * BN_TILE_BYTES, m->q + k * BN_TERNARY_TILE_K);
        sums_store(m->acc + p * BN_PANEL, sums_add(ternary_total(even), ternary_total(odd)));
    }
}

static void ternary_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        ternary_vector(m);
    else
        stream_tokens(m);
}

static void ternary_grouped(const bn_grouped *m) {
    if (m->tokens == 1)
        grouped_vector(m);
    else
        grouped_many(m);
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens <= 32) /* for more, to take the weights apart once pays */
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

int bn_kernels_avx512vnni(bn_kernels *table) {
    table->products.ternary_matmul = ternary_matmul;
    table->products.sketch_matmul = ternary_matmul;
    table->products.ternary_lookup = ternary_lookup;
    table->products.lookup_tokens = LOOKUP_TOKENS;
    table->products.trit_matmul = trit_matmul;
    table->products.ternary_grouped = ternary_grouped;
    table->products.int8_rows = int8_rows;
    table->products.ternary_rows = ternary_rows;
    table->products.ternary_columns = ternary_columns;
    table->products.int8_peak = int8_peak;
    set_float_kernels(table);
    table->attention[BN_KV_INT8].qk = qk_int8;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_avx512vnni)
#endif
