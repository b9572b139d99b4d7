/* SPDX-License-Identifier: MIT
 *
 * avx2.c: AVX2, FMA, F16C and PCLMULQDQ. There is no four-byte dot product here, only
 * vpmaddubsw: pairs of products of an unsigned and a signed byte, added to saturated int16. Both
 * matrix products keep their pairs below the edge, so that nothing ever saturates.
 */
#include "../kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__PCLMUL__)

#include "attention.h"
#include "blocks.h"
#include "crc32.h"
#include "trits.h"

/* GCC 12 would rather make all products first, and run out of registers for the sums. */
#define IN_ORDER(sum) __asm__ volatile("" : "+x"(sum))

INLINE sums dot_pairs(sums sum, bytes w, bytes q) {
    sum = (sums)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(w, q));
    IN_ORDER(sum);
    return sum;
}

INLINE sums add_pairs(sums sum) {
    return (sums)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
}

/* c·q as (±c)·|q|: two products of at most 127·127 fit in int16. */
INLINE sums dot_signed(sums sum, bytes c, bytes q) {
    const bytes pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(c, q));
    sum = sums_add(sum, add_pairs((sums)pairs));
    IN_ORDER(sum);
    return sum;
}

/* Two products of a code where it lies in its byte, at most 2·64, fit in int16. */
INLINE sums sums_dot(sums sum, bytes codes, bytes q) {
    return sums_add(sum, add_pairs((sums)_mm256_maddubs_epi16(codes, q)));
}

#define PRODUCT_ROWS 2
#define PRODUCT_TILES 1
#define PRODUCT_DOT sums_dot
#include "lookup_template.h"

/* --- ternary --- */

/* Half a tile. A pair of codes gives at most 2·2·127 = 508, four times that in fields 1 and 3,
 * which are masked in place: 32 tiles fill `once`, 8 tiles fill `four`. With codes of 3 it is a
 * pair of 762, so that 5 tiles fill `four`. */
INLINE void ternary_fields(sums *once, sums *four, const uint8_t *tile, const int8_t *q) {
    const bytes codes = bytes_load(tile), upper = bytes_shr(codes, 4);
    const bytes low = bytes_fill(0x03), high = bytes_fill(0x0c);
    *once = dot_pairs(*once, bytes_and(codes, low), bytes_spread(q));
    *four = dot_pairs(*four, bytes_and(codes, high), bytes_spread(q + 4));
    *once = dot_pairs(*once, bytes_and(upper, low), bytes_spread(q + 8));
    *four = dot_pairs(*four, bytes_and(upper, high), bytes_spread(q + 12));
}

INLINE void ternary_vector(const bn_matmul *m, const size_t fold) {
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *tile = m->tiles + p * m->panel_stride;
        const int8_t *q = m->q;
        sums top = sums_zero(), top4 = sums_zero(), bottom = sums_zero(), bottom4 = sums_zero();
        for (size_t left = m->k_tiles; left > 0;) {
            sums a = sums_zero(), a4 = sums_zero(), b = sums_zero(), b4 = sums_zero();
            size_t tiles = bn_min(left, fold);
            left -= tiles;
            for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TERNARY_TILE_K) {
                prefetch(tile);
                ternary_fields(&a, &a4, tile, q);
                ternary_fields(&b, &b4, tile + sizeof(bytes), q);
            }
            top = sums_add(top, add_pairs(a)), top4 = sums_add(top4, add_pairs(a4));
            bottom = sums_add(bottom, add_pairs(b)), bottom4 = sums_add(bottom4, add_pairs(b4));
        }
        sums_store(m->acc + p * BN_PANEL, sums_add(top, sums_shr(top4, 2)));
        sums_store(m->acc + p * BN_PANEL + VEC_ROWS, sums_add(bottom, sums_shr(bottom4, 2)));
    }
}

enum { FEW = 6 }; /* with more tokens it is faster to keep what was unpacked (blocks.h) */

/* The same of half a panel and T tokens, for which it is unpacked once. */
INLINE void ternary_few(int32_t *acc, size_t acc_stride, const uint8_t *tile, size_t left,
                        fetching next, const int8_t *q, size_t q_stride, const size_t fold,
                        const size_t T) {
    sums total[FEW], total4[FEW];
    UNROLL
    for (size_t t = 0; t < T; t++)
        total[t] = total4[t] = sums_zero();
    while (left > 0) {
        sums a[FEW], a4[FEW];
        size_t tiles = bn_min(left, fold);
        left -= tiles;
        UNROLL
        for (size_t t = 0; t < T; t++)
            a[t] = a4[t] = sums_zero();
        for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TERNARY_TILE_K) {
            fetch_next(&next);
            const bytes codes = bytes_load(tile), high = bytes_shr(codes, 4);
            UNROLL
            for (size_t f = 0; f < 4; f++) {
                const bytes field = bytes_and(f < 2 ? codes : high, bytes_fill(f % 2 ? 12 : 3));
                UNROLL
                for (size_t t = 0; t < T; t++) {
                    const bytes x = bytes_spread(q + t * q_stride + 4 * f);
                    sums *sum = f % 2 ? &a4[t] : &a[t];
                    *sum = dot_pairs(*sum, field, x);
                }
            }
        }
        UNROLL
        for (size_t t = 0; t < T; t++)
            total[t] = sums_add(total[t], add_pairs(a[t])),
            total4[t] = sums_add(total4[t], add_pairs(a4[t]));
    }
    UNROLL
    for (size_t t = 0; t < T; t++)
        sums_store(acc + t * acc_stride, sums_add(total[t], sums_shr(total4[t], 2)));
}

/* Each half of a panel asks for half of the next one: only the first reads memory. (Zen 3, from
 * memory, with what the tile alone asked for before: 2 tokens 62 to 88 GMAC/s, 4 tokens, then by
 * blocks.h, 99 to 120.) */
INLINE void ternary_tokens(const bn_matmul *m, const size_t fold) {
    const size_t bytes_of_panel = m->k_tiles * BN_TILE_BYTES;
    for (size_t p = 0; p < m->panels; p++)
        for (size_t half = 0; half < 2; half++) {
            const uint8_t *panel = m->tiles + p * m->panel_stride;
            const uint8_t *tile = panel + half * sizeof(bytes);
            int32_t *acc = m->acc + p * BN_PANEL + half * VEC_ROWS;
            const fetching next =
                fetch_share(panel + m->panel_stride, bytes_of_panel, m->k_tiles, half, 2);
#define BLOCK(T)                                                                                   \
    case T:                                                                                        \
        ternary_few(acc, m->acc_stride, tile, m->k_tiles, next, m->q, m->q_stride, fold, T);       \
        break
            BY_TOKENS(m->tokens, BLOCK)
#undef BLOCK
        }
}

static void ternary_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        ternary_vector(m, 8);
    else if (m->tokens <= FEW)
        ternary_tokens(m, 8);
    else
        multiply(m, dot_pairs, add_pairs, 5, CHUNK_TILES); /* 64 pairs of 508 */
}

static void sketch_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        ternary_vector(m, 5);
    else if (m->tokens <= FEW)
        ternary_tokens(m, 5);
    else
        multiply(m, dot_pairs, add_pairs, 5, 10); /* 40 pairs of 762 */
}

/* One token: a group of 8 tiles is what the pairs of ternary_vector hold. */
static void grouped_vector(const bn_grouped *m) {
    const uint8_t *tile = m->tiles;
    const uint16_t *scales = m->scales;
    for (size_t p = 0; p < m->panels; p++) {
        const int8_t *q = m->q;
        vec top = vec_zero(), bottom = vec_zero();
        for (size_t g = 0, left = m->k_tiles; left > 0; g++, scales += BN_PANEL) {
            sums a = sums_zero(), a4 = sums_zero(), b = sums_zero(), b4 = sums_zero();
            size_t tiles = bn_min(left, BN_GROUP_TILES);
            left -= tiles;
            for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TERNARY_TILE_K) {
                prefetch(tile);
                ternary_fields(&a, &a4, tile, q);
                ternary_fields(&b, &b4, tile + sizeof(bytes), q);
            }
            a = sums_add(add_pairs(a), sums_shr(add_pairs(a4), 2)) - m->q_sums[g];
            b = sums_add(add_pairs(b), sums_shr(add_pairs(b4), 2)) - m->q_sums[g];
            top = vec_fma(vec_from_int(a), vec_widen(scales), top);
            bottom = vec_fma(vec_from_int(b), vec_widen(scales + VEC_ROWS), bottom);
        }
        vec_store(m->y + p * BN_PANEL, top);
        vec_store(m->y + p * BN_PANEL + VEC_ROWS, bottom);
    }
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    ternary_matmul(m);
    scale_sums(a);
}

static void ternary_grouped(const bn_grouped *m) {
    if (m->tokens == 1)
        grouped_vector(m);
    else
        grouped_by(m, ternary_matmul, add_group);
}

/* --- ternary, five trits a byte --- */

/* Half a tile: five codes of each byte, at most 5·2·2·127 in a pair, so that 12 tiles fill a sum.
 */
INLINE sums trit_fields(sums sum, const uint8_t *tile, const int8_t *q) {
    trits s = trits_load(tile);
#define FIELD(f)                                                                                   \
    sum = dot_pairs(sum, (bytes)trits_add_codes((octets){0}, s, 1), bytes_spread(q + 4 * f));      \
    s = trits_next(s);
    FIELD(0)
    FIELD(1)
    FIELD(2)
    FIELD(3)
    FIELD(4)
#undef FIELD
    return sum;
}

static void trit_vector(const bn_matmul *m) {
    enum { FOLD = 12 };
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *tile = m->tiles + p * m->panel_stride;
        const int8_t *q = m->q;
        sums top = sums_zero(), bottom = sums_zero();
        for (size_t left = m->k_tiles; left > 0;) {
            sums a = sums_zero(), b = sums_zero();
            size_t tiles = bn_min(left, FOLD);
            left -= tiles;
            for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TRIT_TILE_K) {
                a = trit_fields(a, tile, q);
                b = trit_fields(b, tile + sizeof(bytes), q);
            }
            top = sums_add(top, add_pairs(a)), bottom = sums_add(bottom, add_pairs(b));
        }
        sums_store(m->acc + p * BN_PANEL, top);
        sums_store(m->acc + p * BN_PANEL + VEC_ROWS, bottom);
    }
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens == 1)
        trit_vector(m);
    else
        trits_many(m, ternary_matmul);
}

#define CODES_DOT sums_dot
#define INT8_DOT dot_signed
#define INT8_FLIP 0
#define PEAK_DOT dot_pairs
#include "tier_template.h"

int bn_kernels_avx2(bn_kernels *table) {
    set_products(table);
    set_float_kernels(table);
    table->products.sketch_matmul = sketch_matmul;
    table->bytes.crc32 = crc32;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_avx2)
#endif
