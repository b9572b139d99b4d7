/* SPDX-License-Identifier: MIT
 *
 * avx2.c: AVX2, FMA, F16C and PCLMULQDQ. There is no four-byte dot product, only vpmaddubsw, which
 * adds pairs of products of an unsigned and a signed byte with int16 saturation. The matrix
 * products keep these sums small enough that nothing ever saturates.
 */
#include "../kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__PCLMUL__)

#include "blocks.h"
#include "crc32.h"
#include "float_kernels.h"
#include "trits.h"

extern const bn_training_kernels bn_avx2_training;

/* GCC 12 would compute all products first and run out of registers for the sums. */
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

/* Codes masked in place, at most 2·64: two products fit in int16. */
INLINE sums sums_dot(sums sum, bytes codes, bytes q) {
    return sums_add(sum, add_pairs((sums)_mm256_maddubs_epi16(codes, q)));
}

#define PRODUCT_ROWS 2
#define PRODUCT_TILES 1
#define PRODUCT_DOT sums_dot
#include "lookup_template.h"

/* --- ternary --- */

/* Half a tile. A pair of codes gives at most 2·2·127 = 508, and four times that in fields 1 and 3,
 * which are masked in place: 32 tiles fill `once`, 8 tiles fill `four`. With code 3 a pair gives up
 * to 762, so that 5 tiles fill `four`. */
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

/* MOST tokens of a block: their eight sums and all operands take 14 of 16 registers. With more
 * tokens than FEW it is faster to keep the unpacked codes (blocks.h). */
enum { MOST = 4, FEW = 12 };

typedef enum coding { TWO_BITS, TRITS } coding;

/* Loads half a tile; extracts the codes of one of its fields. Fields of trits must be extracted in
 * order. */
INLINE bytes fields_load(const uint8_t *p, const coding code) {
    return code == TRITS ? (bytes)trits_load(p) : bytes_load(p);
}
INLINE bytes field_of(bytes *tile, const coding code, size_t f) {
    if (code == TWO_BITS)
        return bytes_and(bytes_shr(*tile, 2 * (int)f), bytes_fill(3));
    const trits s = (trits)*tile;
    *tile = (bytes)trits_next(s);
    return (bytes)trits_add_codes((octets){0}, s, 1);
}

/* A panel and T tokens. Unpacked codes serve all tokens, and broadcast activations serve both
 * halves of a tile. There are registers for only one sum per half and token, so fields are shifted
 * down, and a tile adds one pair per field to each sum. */
INLINE void few_tokens(int32_t *acc, size_t acc_stride, const uint8_t *tile, size_t left,
                       const int8_t *q, size_t q_stride, const coding code, const size_t fold,
                       const size_t T) {
    const size_t fields = code == TRITS ? 5 : 4;
    sums total[MOST][2];
    UNROLL
    for (size_t t = 0; t < T; t++)
        total[t][0] = total[t][1] = sums_zero();
    while (left > 0) {
        sums sum[MOST][2];
        size_t tiles = bn_min(left, fold);
        left -= tiles;
        UNROLL
        for (size_t t = 0; t < T; t++)
            sum[t][0] = sum[t][1] = sums_zero();
        for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += 4 * fields) {
            prefetch(tile);
            bytes top = fields_load(tile, code), bottom = fields_load(tile + sizeof(bytes), code);
            UNROLL
            for (size_t f = 0; f < fields; f++) {
                const bytes a = field_of(&top, code, f), b = field_of(&bottom, code, f);
                UNROLL
                for (size_t t = 0; t < T; t++) {
                    const bytes x = bytes_spread(q + t * q_stride + 4 * f);
                    sum[t][0] = dot_pairs(sum[t][0], a, x);
                    sum[t][1] = dot_pairs(sum[t][1], b, x);
                }
            }
        }
        UNROLL
        for (size_t t = 0; t < T; t++)
            total[t][0] = sums_add(total[t][0], add_pairs(sum[t][0])),
            total[t][1] = sums_add(total[t][1], add_pairs(sum[t][1]));
    }
    UNROLL
    for (size_t t = 0; t < T; t++)
        sums_store(acc + t * acc_stride, total[t][0]),
            sums_store(acc + t * acc_stride + VEC_ROWS, total[t][1]);
}

/* In blocks of nearly equal size. */
INLINE void by_few_tokens(const bn_matmul *m, const coding code, const size_t fold) {
    const size_t blocks = (m->tokens + MOST - 1) / MOST;
    for (size_t p = 0; p < m->panels; p++)
        for (size_t b = 0; b < blocks; b++) {
            const size_t t = m->tokens * b / blocks;
            const uint8_t *panel = m->tiles + p * m->panel_stride;
            int32_t *acc = m->acc + t * m->acc_stride + p * BN_PANEL;
            const int8_t *q = m->q + t * m->q_stride;
#define BLOCK(T)                                                                                   \
    case T:                                                                                        \
        few_tokens(acc, m->acc_stride, panel, m->k_tiles, q, m->q_stride, code, fold, T);          \
        break
            switch (m->tokens * (b + 1) / blocks - t) {
                BLOCK(1);
                BLOCK(2);
                BLOCK(3);
                BLOCK(4);
            }
#undef BLOCK
        }
}

/* vector_fold: tiles that fill the sums for a single token; fold: the same for several. */
INLINE void ternary_by(const bn_matmul *m, const size_t vector_fold, const size_t fold) {
    if (m->tokens == 1)
        ternary_vector(m, vector_fold);
    else if (m->tokens <= FEW)
        by_few_tokens(m, TWO_BITS, fold);
    else
        multiply(m, dot_pairs, add_pairs, 5, fold);
}

static void ternary_matmul(const bn_matmul *m) {
    ternary_by(m, 8, CHUNK_TILES); /* 64 pairs of 508 */
}

static void sketch_matmul(const bn_matmul *m) {
    ternary_by(m, 5, 10); /* 40 pairs of 762 */
}

/* One token: a group has 8 tiles, as many as the int16 sums can hold. */
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

/* Five trits per byte: 12 tiles fill a sum with 60 pairs of 508. */
static void trit_matmul(const bn_matmul *m) {
    if (m->tokens <= MOST)
        by_few_tokens(m, TRITS, 12);
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
    table->training = bn_avx2_training;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_avx2)
#endif
