/* SPDX-License-Identifier: MIT
 *
 * zmm.h: the register of AVX-512 under the names that all tiers use (register.h).
 */
#ifndef BITNET_X86_ZMM_H
#define BITNET_X86_ZMM_H

#include "common.h"

typedef __m512i bytes;
typedef int32_t sums __attribute__((vector_size(64))); /* as __m512i, GCC 12 copies every sum */
enum { VEC_ROWS = 16, REGISTERS = 32 };

INLINE bytes bytes_load(const void *p) {
    return _mm512_loadu_si512(p);
}
INLINE void bytes_store(void *p, bytes a) {
    _mm512_storeu_si512(p, a);
}
INLINE bytes bytes_fill(int byte) {
    return _mm512_set1_epi8((char)byte);
}
/* broadcasts four activations to all rows */
INLINE bytes bytes_spread(const int8_t *four) {
    int32_t word;
    memcpy(&word, four, sizeof word);
    return _mm512_set1_epi32(word);
}
INLINE bytes bytes_and(bytes a, bytes b) {
    return _mm512_and_si512(a, b);
}
/* unsigned bytes: saturating a - b; average of a and b, rounded up */
INLINE bytes bytes_less(bytes a, bytes b) {
    return _mm512_subs_epu8(a, b);
}
INLINE bytes bytes_average(bytes a, bytes b) {
    return _mm512_avg_epu8(a, b);
}
INLINE bytes bytes_xor(bytes a, bytes b) {
    return _mm512_xor_si512(a, b);
}
/* interleave elements of a and b from the low or the high half of each 16 bytes */
#define bytes_low8(a, b) _mm512_unpacklo_epi8(a, b)
#define bytes_high8(a, b) _mm512_unpackhi_epi8(a, b)
#define bytes_low16(a, b) _mm512_unpacklo_epi16(a, b)
#define bytes_high16(a, b) _mm512_unpackhi_epi16(a, b)
#define bytes_low32(a, b) _mm512_unpacklo_epi32(a, b)
#define bytes_high32(a, b) _mm512_unpackhi_epi32(a, b)
#define bytes_low64(a, b) _mm512_unpacklo_epi64(a, b)
#define bytes_high64(a, b) _mm512_unpackhi_epi64(a, b)
/* rows 0, 4, 8 and 12 */
INLINE bytes bytes_every4(const __m128i *row) {
    const bytes low = _mm512_castsi256_si512(_mm256_set_m128i(row[4], row[0]));
    return _mm512_inserti64x4(low, _mm256_set_m128i(row[12], row[8]), 1);
}
/* 16-bit shifts: bits of the neighbour byte are shifted in */
#define bytes_shr(a, n) _mm512_srli_epi16(a, n)
#define bytes_shl(a, n) _mm512_slli_epi16(a, n)

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
INLINE int32_t sums_total(sums a) {
    return _mm512_reduce_add_epi32((__m512i)a);
}
/* the total of each of four registers */
INLINE __m128i sums_totals(const sums s[4]) {
    const __m512i a = (__m512i)s[0], b = (__m512i)s[1], c = (__m512i)s[2], d = (__m512i)s[3];
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i of =
        _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half =
        _mm256_add_epi32(_mm512_castsi512_si256(of), _mm512_extracti64x4_epi64(of, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
/* arithmetic shift */
#define sums_shr(a, n) ((sums)_mm512_srai_epi32((__m512i)(a), n))
INLINE sums sums_widen(const int16_t *p) {
    return (sums)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
/* interleave a and b: their first halves, or their second halves */
INLINE sums sums_mix_low(sums a, sums b) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return (sums)_mm512_permutex2var_epi32((__m512i)a, order, (__m512i)b);
}
INLINE sums sums_mix_high(sums a, sums b) {
    const __m512i order =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return (sums)_mm512_permutex2var_epi32((__m512i)a, order, (__m512i)b);
}

typedef uint64_t quads __attribute__((vector_size(64)));
/* product of the lower 32 bits of each lane */
INLINE quads quads_multiply(quads a, quads b) {
    return (quads)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}
INLINE quads quads_widen(const uint32_t *p) {
    return (quads)_mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)p));
}

typedef int16_t shorts __attribute__((vector_size(64)));
INLINE shorts shorts_widen(__m128i low, __m128i high) {
    return (shorts)_mm512_cvtepi8_epi16(_mm256_set_m128i(high, low));
}
INLINE shorts shorts_abs(shorts a) {
    return (shorts)_mm512_abs_epi16((__m512i)a);
}

typedef __m512 vec;
enum { LANES = 16, QUERIES = 4 };
#define PARTS 1

INLINE vec vec_zero(void) {
    return _mm512_setzero_ps();
}
INLINE vec vec_set(float a) {
    return _mm512_set1_ps(a);
}
INLINE vec vec_load(const float *p) {
    return _mm512_loadu_ps(p);
}
INLINE void vec_store(float *p, vec a) {
    _mm512_storeu_ps(p, a);
}
INLINE __mmask16 first_lanes(size_t n) {
    return (__mmask16)(n < LANES ? (1u << n) - 1 : 0xffff);
}
INLINE vec vec_load_first(const float *p, size_t n) {
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
INLINE void vec_store_first(float *p, vec a, size_t n) {
    _mm512_mask_storeu_ps(p, first_lanes(n), a);
}
/* the first n lanes of a, or all if n is larger; the others are 0 */
INLINE vec vec_first(vec a, size_t n) {
    return _mm512_maskz_mov_ps(first_lanes(n), a);
}
INLINE vec vec_widen(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vec vec_from_int(sums a) {
    return _mm512_cvtepi32_ps((__m512i)a);
}
INLINE vec vec_from_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* bfloat16 to float, from the lower or the upper halves of words */
INLINE vec vec_lower_half(bytes words) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
INLINE vec vec_upper_half(bytes words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int32_t)0xffff0000)));
}
INLINE vec vec_fma(vec a, vec b, vec c) {
    return _mm512_fmadd_ps(a, b, c);
}
INLINE vec vec_add(vec a, vec b) {
    return _mm512_add_ps(a, b);
}
INLINE vec vec_sub(vec a, vec b) {
    return _mm512_sub_ps(a, b);
}
INLINE vec vec_mul(vec a, vec b) {
    return _mm512_mul_ps(a, b);
}
INLINE vec vec_div(vec a, vec b) {
    return _mm512_div_ps(a, b);
}
INLINE vec vec_max(vec a, vec b) {
    return _mm512_max_ps(a, b);
}
INLINE vec vec_min(vec a, vec b) {
    return _mm512_min_ps(a, b);
}
INLINE vec vec_abs(vec a) {
    return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a);
}
INLINE vec vec_negate(vec a) {
    return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f));
}
INLINE sums vec_to_int(vec a) {
    return (sums)_mm512_cvtps_epi32(a);
}
/* a * 2^n, n integral */
INLINE vec vec_add_exponent(vec a, vec n) {
    return _mm512_scalef_ps(a, n);
}
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion" /* in the intrinsics' macros, without -O */
INLINE void vec_narrow(uint16_t *p, vec a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
INLINE vec vec_round(vec a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#pragma GCC diagnostic pop
/* Appends `first` + j to list for each lane j of a that is not below bar; returns how many. */
INLINE size_t vec_reaching(uint32_t *list, size_t first, vec a, vec bar) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 reach = _mm512_cmp_ps_mask(a, bar, _CMP_NLT_UQ);
    const __m512i place = _mm512_add_epi32(lane, _mm512_set1_epi32((int32_t)first));
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi32(reach, place));
    return (size_t)__builtin_popcount(reach);
}
INLINE float vec_largest(vec a) {
    return _mm512_reduce_max_ps(a);
}
/* for a, b >= 0, compared by their bits; NaN is the largest */
INLINE vec vec_most(vec a, vec b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
INLINE float vec_most_of(vec a) {
    const int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(a));
    float most;
    memcpy(&most, &bits, sizeof most);
    return most;
}
INLINE float vec_tree(const vec s[PARTS]) {
    return tree_of_8(_mm256_add_ps(_mm512_castps512_ps256(s[0]), _mm512_extractf32x8_ps(s[0], 1)));
}
INLINE void sums_store_bytes(int8_t *p, sums a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
}
/* four registers, in order */
INLINE void sums_store_bytes4(int8_t *p, const sums a[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i low = _mm512_packs_epi32((__m512i)a[0], (__m512i)a[1]);
    const __m512i mixed = _mm512_packs_epi16(low, _mm512_packs_epi32((__m512i)a[2], (__m512i)a[3]));
    bytes_store(p, _mm512_permutexvar_epi32(order, mixed));
}

#endif
