/* SPDX-License-Identifier: MIT
 *
 * avxvnni.c: AVX-VNNI, the 256-bit form of vpdpbusd on CPUs without AVX-512, on top of AVX2. A
 * register holds eight rows of a weight tile.
 *
 * With BITNET_AVXVNNI_AS_EVEX the same code uses the AVX-512VL form of the instruction, so that it
 * can be tested where only that one exists.
 */
#include "../kernels.h"

#if defined(__AVX2__) &&                                                                           \
    (defined(__AVXVNNI__) || (defined(BITNET_AVXVNNI_AS_EVEX) && defined(__AVX512VNNI__)))

#include "blocks.h"
#include "grouped.h"
#include "scale.h"
#include "trit_stream.h"

/* tokens of a stream: 12 sums, the tile, a field and activations take 15 of 16 registers */
enum { MOST = 3 };

INLINE sums sums_dot(sums sum, bytes w, bytes q) {
#if defined(BITNET_AVXVNNI_AS_EVEX)
    return (sums)_mm256_dpbusd_epi32((__m256i)sum, w, q);
#else
    return (sums)_mm256_dpbusd_avx_epi32((__m256i)sum, w, q);
#endif
}

#define PRODUCT_ROWS 6
#define PRODUCT_TILES 1
#define PRODUCT_DOT sums_dot
#include "lookup_template.h"

/* One linear stream; each half of a tile has four sums, to hide latency. */
static void ternary_vector(const bn_matmul *m) {
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *tile = m->tiles + p * m->panel_stride;
        sums top[4] = {sums_zero(), sums_zero(), sums_zero(), sums_zero()};
        sums bottom[4] = {sums_zero(), sums_zero(), sums_zero(), sums_zero()};
        for (size_t k = 0; k < m->k_tiles; k++, tile += BN_TILE_BYTES) {
            prefetch(tile);
            ternary_fields(top, tile, m->q + k * BN_TERNARY_TILE_K, sums_dot);
            ternary_fields(bottom, tile + sizeof(bytes), m->q + k * BN_TERNARY_TILE_K, sums_dot);
        }
        sums_store(m->acc + p * BN_PANEL, ternary_total(top));
        sums_store(m->acc + p * BN_PANEL + VEC_ROWS, ternary_total(bottom));
    }
}

static void ternary_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        ternary_vector(m);
    else if (m->tokens <= MOST)
        stream_tokens(m, sums_dot, MOST);
    else
        multiply(m, sums_dot, no_fold, 6, CHUNK_TILES);
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    ternary_matmul(m);
    scale_sums(a);
}

static void ternary_grouped(const bn_grouped *m) {
    if (m->tokens == 1)
        grouped_vector(m, sums_dot);
    else
        grouped_by(m, ternary_matmul, add_group);
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens <= 16)
        trit_few(m, sums_dot, 8);
    else
        trits_many(m, ternary_matmul);
}

#define CODES_DOT sums_dot
#define INT8_DOT sums_dot
#define INT8_FLIP 0x80
#define PEAK_DOT sums_dot
#include "tier_template.h"

int bn_kernels_avxvnni(bn_kernels *table) {
    set_products(table);
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_avxvnni)
#endif
