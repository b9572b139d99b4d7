/* SPDX-License-Identifier: MIT
 *
 * values.c: checks for invalid values, without a branch per value.
 */
#include "values.h"

#include <string.h>

static uint64_t word(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* Whether a 2-bit field is 3. n is a multiple of 64. */
int bn_has_ternary_3(const uint8_t *p, size_t n) {
    uint64_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        const uint64_t w = word(p + i);
        bad |= w & w >> 1;
    }
    return (bad & 0x5555555555555555u) != 0;
}

/* Whether a byte is none of the 243 that encode five codes: a byte is ceil(256 n / 243) exactly
 * when 243·byte = 256 n + r with 0 <= r < 243. */
int bn_has_no_trits(const uint8_t *p, size_t n) {
    uint8_t bad = 0;
    for (size_t i = 0; i < n; i++)
        bad |= (uint8_t)(243u * p[i]) >= 243u;
    return bad != 0;
}

/* Whether a code is -128. */
int bn_has_int8_least(const uint8_t *p, size_t n) {
    int bad = 0;
    for (size_t i = 0; i < n; i++)
        bad |= p[i] == 0x80;
    return bad;
}

/* Whether a scale is not finite, normal and > 0. As integers: below the smallest normal float,
 * or at infinity and above, where NaN and all negative numbers lie too. */
int bn_has_bad_scale(const uint8_t *p, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        uint32_t bits;
        memcpy(&bits, p + i, sizeof bits);
        bad |= bits - 0x00800000u >= 0x7F800000u - 0x00800000u;
    }
    return bad != 0;
}

/* Whether a float is not both finite and >= 0, also as integers. */
int bn_has_negative(const uint8_t *p, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        uint32_t bits;
        memcpy(&bits, p + i, sizeof bits);
        bad |= bits >= 0x7F800000u;
    }
    return bad != 0;
}

/* Whether a scale of scope GROUP is not both finite and > 0, also as integers. */
int bn_has_bad_group_scale(const uint8_t *p, size_t n) {
    uint16_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        uint16_t bits;
        memcpy(&bits, p + i, sizeof bits);
        bad |= (uint16_t)(bits - 1u) >= 0x7C00u - 1u;
    }
    return bad != 0;
}

/* Whether a float has all bits of its exponent set. */
int bn_has_not_finite_f32(const uint8_t *p, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        uint32_t bits;
        memcpy(&bits, p + i, sizeof bits);
        bad |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    return bad != 0;
}

int bn_has_not_finite_f16(const uint8_t *p, size_t n) {
    uint16_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        uint16_t bits;
        memcpy(&bits, p + i, sizeof bits);
        bad |= (bits & 0x7C00u) == 0x7C00u;
    }
    return bad != 0;
}
