/* SPDX-License-Identifier: MIT
 *
 * kernels_avx512vnni.c: AVX-512 F, BW, DQ, VL and VNNI. A register is a weight tile, and the
 * 16 lanes of the float rule.
 */
#include "../kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) &&                      \
    defined(__AVX512VL__) && defined(__AVX512VNNI__)

#include "common.h"

typedef __m512i bytes;
typedef int32_t sums __attribute__((vector_size(64))); /* as __m512i, GCC 12 copies every sum */
enum { VEC_ROWS = 16 };
#define GROUP 4

INLINE bytes bytes_load(const void *p) {
    return _mm512_loadu_si512(p);
}
INLINE void bytes_store(void *p, bytes a) {
    _mm512_storeu_si512(p, a);
}
INLINE bytes bytes_fill(int byte) {
    return _mm512_set1_epi8((char)byte);
}
INLINE bytes bytes_spread(const int8_t *four) {
    int32_t word;
    memcpy(&word, four, sizeof word);
    return _mm512_set1_epi32(word);
}
INLINE bytes bytes_and(bytes a, bytes b) {
    return _mm512_and_si512(a, b);
}
INLINE bytes bytes_select(bytes mask, bytes a, bytes b) {
    return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}
#define bytes_shl(a, n) _mm512_slli_epi16(a, n)
#define bytes_shr(a, n) _mm512_srli_epi16(a, n)

INLINE sums sums_zero(void) {
    return (sums)_mm512_setzero_si512();
}
INLINE sums sums_load(const int32_t *p) {
    return (sums)_mm512_loadu_si512(p);
}
INLINE void sums_store(int32_t *p, sums a) {
    _mm512_storeu_si512(p, (__m512i)a);
}
INLINE sums sums_add(sums a, sums b) {
    return (sums)_mm512_add_epi32((__m512i)a, (__m512i)b);
}
#define sums_shr(a, n) ((sums)_mm512_srai_epi32((__m512i)(a), n))
INLINE sums sums_dot(sums sum, bytes w, bytes q) {
    return (sums)_mm512_dpbusd_epi32((__m512i)sum, w, q);
}
#define KEEP(a) __asm__ volatile("" : "+v"(a)) /* or the compiler solves the loop */

#include "vnni.h"

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

static void int8_vector(const bn_matmul *m) {
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *high = m->tiles + p * m->panel_stride, *low = m->low + p * m->panel_stride;
        sums even[2] = {sums_zero(), sums_zero()}, odd[2] = {sums_zero(), sums_zero()};
        size_t k = 0;
        for (; k + 2 <= m->k_tiles; k += 2) {
            size_t at = k * BN_TILE_BYTES, next = at + BN_TILE_BYTES;
            int8_columns(even, high + at, low + at, m->q + k * BN_INT8_TILE_K);
            int8_columns(odd, high + next, low + next, m->q + (k + 1) * BN_INT8_TILE_K);
        }
        if (k < m->k_tiles)
            int8_columns(even, high + k * BN_TILE_BYTES, low + k * BN_TILE_BYTES,
                         m->q + k * BN_INT8_TILE_K);
        sums_store(m->acc + p * BN_PANEL,
                   sums_add(sums_add(even[0], even[1]), sums_add(odd[0], odd[1])));
    }
}

int bn_kernels_avx512vnni(bn_kernels *table) {
    table->isa = "avx512vnni";
    table->ternary_matmul = ternary_matmul;
    table->int8_matmul = int8_matmul;
    table->int8_peak = int8_peak;
    return 1;
}

#else

int bn_kernels_avx512vnni(bn_kernels *table) {
    (void)table;
    return 0;
}

#endif
