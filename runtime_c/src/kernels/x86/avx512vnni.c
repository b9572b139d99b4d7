/* SPDX-License-Identifier: MIT
 *
 * avx512vnni.c: AVX-512 F, BW, DQ, VL and VNNI. A register holds a weight tile, or the 16 lanes of
 * the float rule.
 */
#include "../kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) &&                      \
    defined(__AVX512VL__) && defined(__AVX512VNNI__)

#define REGISTER_BITS 512
#include "amx.h"
#include "float_kernels.h"
#include "grouped.h"
#include "panels.h"
#include "trit_stream.h"

extern const bn_training_kernels bn_avx512vnni_training;

/* tokens of a stream: 24 sums, 4 masks, the tile and a field take 30 of 32 registers */
enum { MOST = 6 };

INLINE sums sums_dot(sums sum, bytes w, bytes q) {
    return (sums)_mm512_dpbusd_epi32((__m512i)sum, w, q);
}

#define PRODUCT_ROWS 6
#define PRODUCT_TILES 2
#define PRODUCT_DOT sums_dot
#include "lookup_template.h"

/* One linear stream; two tiles at a time, so that eight sums hide the latency. */
static void ternary_vector(const bn_matmul *m) {
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *tile = m->tiles + p * m->panel_stride;
        sums even[4] = {sums_zero(), sums_zero(), sums_zero(), sums_zero()};
        sums odd[4] = {sums_zero(), sums_zero(), sums_zero(), sums_zero()};
        size_t k = 0;
        for (; k + 2 <= m->k_tiles; k += 2) {
            prefetch(tile + k * BN_TILE_BYTES);
            prefetch(tile + (k + 1) * BN_TILE_BYTES);
            ternary_fields(even, tile + k * BN_TILE_BYTES, m->q + k * BN_TERNARY_TILE_K, sums_dot);
            ternary_fields(odd, tile + (k + 1) * BN_TILE_BYTES, m->q + (k + 1) * BN_TERNARY_TILE_K,
                           sums_dot);
        }
        if (k < m->k_tiles)
            ternary_fields(even, tile + k * BN_TILE_BYTES, m->q + k * BN_TERNARY_TILE_K, sums_dot);
        sums_store(m->acc + p * BN_PANEL, sums_add(ternary_total(even), ternary_total(odd)));
    }
}

/* The product without its first `panels` panels. */
static bn_matmul matmul_behind(const bn_matmul *m, size_t panels) {
    bn_matmul rest = *m;
    rest.tiles += panels * m->panel_stride;
    rest.acc += panels * BN_PANEL;
    rest.panels -= panels;
    return rest;
}

static void ternary_matmul(const bn_matmul *m) {
    size_t done = 0;
    if (m->tokens == 1) {
        ternary_vector(m);
        return;
    }
    if (m->tokens == 2)
        for (; done + 2 <= m->panels; done += 2)
            pair_panels(m, done, sums_dot);
    else
        done = panels_tokens(m, NULL, m->panels, sums_dot);
    const bn_matmul rest = matmul_behind(m, done);
    stream_tokens(&rest, sums_dot, MOST);
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    const size_t done = m->tokens > 2 ? panels_tokens(m, a, a->n / BN_PANEL, sums_dot) : 0;
    const bn_matmul rest = matmul_behind(m, done);
    if (rest.panels > 0)
        ternary_matmul(&rest);
    if (done * BN_PANEL < a->n)
        scale_from(a, done * BN_PANEL);
}

static void ternary_grouped(const bn_grouped *m) {
    if (m->tokens == 1)
        grouped_vector(m, sums_dot);
    else
        grouped_many(m, sums_dot);
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens <= CODES_MOST) /* for more, decoding the weights once pays off */
        trit_few(m, sums_dot, CODES_MOST);
    else
        trits_many(m, ternary_matmul);
}

#define CODES_DOT sums_dot
#define INT8_DOT sums_dot
#define INT8_FLIP 0x80
#define PEAK_DOT sums_dot
#include "tier_template.h"

const bn_product_kernels bn_avx512vnni = {.ternary_matmul = ternary_matmul,
                                          .ternary_scaled = ternary_scaled,
                                          .trit_matmul = trit_matmul,
                                          .ternary_grouped = ternary_grouped,
                                          .int8_rows = int8_rows};

const bn_attention_kernels bn_avx512vnni_int8 = {.qk = qk_int8, .pv = pv_int8};

int bn_kernels_avx512vnni(bn_kernels *table) {
    set_products(table);
    set_float_kernels(table);
    table->training = bn_avx512vnni_training;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_avx512vnni)
#endif
