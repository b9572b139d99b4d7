/* SPDX-License-Identifier: MIT
 *
 * tier_template.h: kernels that differ between tiers in one instruction only, and set_products,
 * which enters them and the tier's other products in the table.
 *
 * Included last, where ternary_matmul, ternary_lookup, trit_matmul, ternary_grouped are defined.
 * Parameters:
 *   CODES_DOT  adds four products of unsigned bytes <= 128 (codes in any field) and int8
 *   INT8_DOT   adds four products of int8 codes and int8
 *   INT8_FLIP  0x80 if INT8_DOT takes codes as unsigned bytes with 128 added, else 0
 *   PEAK_DOT   the dot product that int8_peak measures
 */
#if !defined(CODES_DOT) || !defined(INT8_DOT) || !defined(INT8_FLIP) || !defined(PEAK_DOT)
#error "a parameter is missing"
#endif

#include "int8_cache.h"
#include "k4v8_cache.h"
#include "lines.h"
#include "rows.h"

static void int8_rows(const bn_int8_rows *m) {
    rows_all(m, INT8_DOT, INT8_FLIP);
}

static void ternary_rows(const bn_lines *m) {
    lines_rows(m, CODES_DOT);
}

static void ternary_columns(const bn_lines *m) {
    lines_columns(m, CODES_DOT);
}

static uint64_t int8_peak(uint64_t rounds, int32_t *sink) {
    return peak(rounds, sink, PEAK_DOT);
}

static void qk_int8(const bn_qk *a) {
    qk_int8_all(a, INT8_DOT, INT8_FLIP);
}

static void pv_int8(const bn_pv *a) {
    pv_int8_all(a, CODES_DOT);
}

static void qk_k4v8(const bn_qk *a) {
    qk_k4_all(a, CODES_DOT);
}

static void set_products(bn_kernels *table) {
    table->products.ternary_matmul = ternary_matmul;
    table->products.ternary_scaled = ternary_scaled;
    table->products.sketch_matmul = ternary_matmul;
    table->products.ternary_lookup = ternary_lookup;
    table->products.lookup_tokens = LOOKUP_TOKENS;
    table->products.lookup_rows = 640; /* with fewer, building tables costs more than it saves */
    table->products.lookup_cols = 0;
    table->products.trit_matmul = trit_matmul;
    table->products.ternary_grouped = ternary_grouped;
    table->products.int8_rows = int8_rows;
    table->products.ternary_rows = ternary_rows;
    table->products.ternary_columns = ternary_columns;
    table->products.int8_peak = int8_peak;
    table->attention[BN_KV_INT8].qk = qk_int8;
    table->attention[BN_KV_INT8].pv = pv_int8;
    table->attention[BN_KV_K4V8].qk = qk_k4v8;
    table->attention[BN_KV_K4V8].pv = pv_int8;
}

#undef CODES_DOT
#undef INT8_DOT
#undef INT8_FLIP
#undef PEAK_DOT
