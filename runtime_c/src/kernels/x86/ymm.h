/* SPDX-License-Identifier: MIT
 *
 * ymm.h: the register of AVX2 under the names that all tiers use (register.h).
 */
#ifndef BITNET_X86_YMM_H
#define BITNET_X86_YMM_H

#include "common.h"

typedef __m256i bytes;
typedef int32_t sums __attribute__((vector_size(32))); /* as __m256i, GCC 12 copies every sum */
enum { VEC_ROWS = 8, REGISTERS = 16 };

INLINE bytes bytes_load(const void *p) {
    return _mm256_loadu_si256(p);
}
INLINE void bytes_store(void *p, bytes a) {
    _mm256_storeu_si256(p, a);
}
INLINE bytes bytes_fill(int byte) {
    return _mm256_set1_epi8((char)byte);
}
/* broadcasts four activations to all rows */
INLINE bytes bytes_spread(const int8_t *four) {
    int32_t word;
    memcpy(&word, four, sizeof word);
    return _mm256_set1_epi32(word);
}
INLINE bytes bytes_and(bytes a, bytes b) {
    return _mm256_and_si256(a, b);
}
/* unsigned bytes: saturating a - b; average of a and b, rounded up */
INLINE bytes bytes_less(bytes a, bytes b) {
    return _mm256_subs_epu8(a, b);
}
INLINE bytes bytes_average(bytes a, bytes b) {
    return _mm256_avg_epu8(a, b);
}
INLINE bytes bytes_xor(bytes a, bytes b) {
    return _mm256_xor_si256(a, b);
}
/* interleave elements of a and b from the low or the high half of each 16 bytes */
#define bytes_low8(a, b) _mm256_unpacklo_epi8(a, b)
#define bytes_high8(a, b) _mm256_unpackhi_epi8(a, b)
#define bytes_low16(a, b) _mm256_unpacklo_epi16(a, b)
#define bytes_high16(a, b) _mm256_unpackhi_epi16(a, b)
#define bytes_low32(a, b) _mm256_unpacklo_epi32(a, b)
#define bytes_high32(a, b) _mm256_unpackhi_epi32(a, b)
#define bytes_low64(a, b) _mm256_unpacklo_epi64(a, b)
#define bytes_high64(a, b) _mm256_unpackhi_epi64(a, b)
/* rows 0 and 4 */
INLINE bytes bytes_every4(const __m128i *row) {
    return _mm256_set_m128i(row[4], row[0]);
}
/* 16-bit shifts: bits of the neighbour byte are shifted in */
#define bytes_shr(a, n) _mm256_srli_epi16(a, n)
#define bytes_shl(a, n) _mm256_slli_epi16(a, n)

INLINE sums sums_zero(void) {
    return (sums)_mm256_setzero_si256();
}
INLINE sums sums_load(const int32_t *p) {
    return (sums)_mm256_loadu_si256((const __m256i *)p);
}
INLINE void sums_store(int32_t *p, sums a) {
    _mm256_storeu_si256((__m256i *)p, (__m256i)a);
}
INLINE sums sums_add(sums a, sums b) {
    return (sums)_mm256_add_epi32((__m256i)a, (__m256i)b);
}
INLINE int32_t sums_total(sums a) {
    __m128i s =
        _mm_add_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}
/* the total of each of four registers */
INLINE __m128i sums_totals(const sums s[4]) {
    const __m256i ab = _mm256_hadd_epi32((__m256i)s[0], (__m256i)s[1]);
    const __m256i cd = _mm256_hadd_epi32((__m256i)s[2], (__m256i)s[3]);
    const __m256i of = _mm256_hadd_epi32(ab, cd);
    return _mm_add_epi32(_mm256_castsi256_si128(of), _mm256_extracti128_si256(of, 1));
}
/* arithmetic shift */
#define sums_shr(a, n) ((sums)_mm256_srai_epi32((__m256i)(a), n))
INLINE sums sums_widen(const int16_t *p) {
    return (sums)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)p));
}
/* interleave a and b: their first halves, or their second halves */
INLINE sums sums_mix_low(sums a, sums b) {
    return (sums)_mm256_permute2x128_si256(_mm256_unpacklo_epi32((__m256i)a, (__m256i)b),
                                           _mm256_unpackhi_epi32((__m256i)a, (__m256i)b), 0x20);
}
INLINE sums sums_mix_high(sums a, sums b) {
    return (sums)_mm256_permute2x128_si256(_mm256_unpacklo_epi32((__m256i)a, (__m256i)b),
                                           _mm256_unpackhi_epi32((__m256i)a, (__m256i)b), 0x31);
}

typedef uint64_t quads __attribute__((vector_size(32)));
/* product of the lower 32 bits of each lane */
INLINE quads quads_multiply(quads a, quads b) {
    return (quads)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}
INLINE quads quads_widen(const uint32_t *p) {
    return (quads)_mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)p));
}

typedef int16_t shorts __attribute__((vector_size(32)));
INLINE shorts shorts_widen(__m128i low, __m128i high) {
    (void)high;
    return (shorts)_mm256_cvtepi8_epi16(low);
}
INLINE shorts shorts_abs(shorts a) {
    return (shorts)_mm256_abs_epi16((__m256i)a);
}

typedef __m256 vec;
enum { LANES = 8, QUERIES = 2 };
#define PARTS 2

INLINE vec vec_zero(void) {
    return _mm256_setzero_ps();
}
INLINE vec vec_set(float a) {
    return _mm256_set1_ps(a);
}
INLINE vec vec_load(const float *p) {
    return _mm256_loadu_ps(p);
}
INLINE void vec_store(float *p, vec a) {
    _mm256_storeu_ps(p, a);
}
/* the first n lanes of a, or all if n is larger; the others are 0 */
INLINE vec vec_first(vec a, size_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i most = _mm256_set1_epi32(n < LANES ? (int32_t)n : LANES);
    return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(most, lane)));
}
INLINE vec vec_load_first(const float *p, size_t n) {
    float lanes[LANES] = {0};
    if (n >= LANES)
        return vec_load(p);
    memcpy(lanes, p, n * sizeof *p);
    return vec_load(lanes);
}
INLINE void vec_store_first(float *p, vec a, size_t n) {
    float lanes[LANES];
    if (n >= LANES) {
        vec_store(p, a);
        return;
    }
    vec_store(lanes, a);
    memcpy(p, lanes, n * sizeof *p);
}
INLINE vec vec_widen(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE vec vec_from_int(sums a) {
    return _mm256_cvtepi32_ps((__m256i)a);
}
INLINE vec vec_from_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
/* bfloat16 to float, from the lower or the upper halves of words */
INLINE vec vec_lower_half(bytes words) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
INLINE vec vec_upper_half(bytes words) {
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int32_t)0xffff0000)));
}
INLINE void vec_narrow(uint16_t *p, vec a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
INLINE vec vec_fma(vec a, vec b, vec c) {
    return _mm256_fmadd_ps(a, b, c);
}
INLINE vec vec_add(vec a, vec b) {
    return _mm256_add_ps(a, b);
}
INLINE vec vec_sub(vec a, vec b) {
    return _mm256_sub_ps(a, b);
}
INLINE vec vec_mul(vec a, vec b) {
    return _mm256_mul_ps(a, b);
}
INLINE vec vec_div(vec a, vec b) {
    return _mm256_div_ps(a, b);
}
INLINE vec vec_max(vec a, vec b) {
    return _mm256_max_ps(a, b);
}
INLINE vec vec_min(vec a, vec b) {
    return _mm256_min_ps(a, b);
}
INLINE vec vec_abs(vec a) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
INLINE vec vec_negate(vec a) {
    return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f));
}
INLINE vec vec_round(vec a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE sums vec_to_int(vec a) {
    return (sums)_mm256_cvtps_epi32(a);
}
/* a * 2^n, n integral */
INLINE vec vec_add_exponent(vec a, vec n) {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shift));
}
/* Appends `first` + j to list for each lane j of a that is not below bar; returns how many. */
INLINE size_t vec_reaching(uint32_t *list, size_t first, vec a, vec bar) {
    unsigned reach = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, bar, _CMP_NLT_UQ));
    size_t n = 0;
    for (; reach != 0; reach &= reach - 1)
        list[n++] = (uint32_t)first + (uint32_t)__builtin_ctz(reach);
    return n;
}
INLINE float vec_largest(vec a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
/* for a, b >= 0, compared by their bits; NaN is the largest */
INLINE vec vec_most(vec a, vec b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
INLINE float vec_most_of(vec a) {
    const __m256i bits = _mm256_castps_si256(a);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    m = _mm_max_epi32(m, _mm_unpackhi_epi64(m, m));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(m, _mm_shuffle_epi32(m, 1))));
}
INLINE float vec_tree(const vec s[PARTS]) {
    return tree_of_8(_mm256_add_ps(s[0], s[1]));
}
INLINE void sums_store_bytes(int8_t *p, sums a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)a),
                                          _mm256_extracti128_si256((__m256i)a, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
/* four registers, in order */
INLINE void sums_store_bytes4(int8_t *p, const sums a[4]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i low = _mm256_packs_epi32((__m256i)a[0], (__m256i)a[1]);
    const __m256i mixed = _mm256_packs_epi16(low, _mm256_packs_epi32((__m256i)a[2], (__m256i)a[3]));
    bytes_store(p, _mm256_permutevar8x32_epi32(mixed, order));
}

#endif
