/* SPDX-License-Identifier: MIT
 *
 * crc32.h: zlib's CRC-32 by carry-less multiplication. 128 bits of the message are moved n bits
 * ahead by multiplying their halves by x^(n+64) and x^n modulo the polynomial, so that four streams
 * of 128 bits are folded into the data 512 bits later. Gopal et al., "Fast CRC Computation for
 * Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.
 */
#ifndef BITNET_X86_CRC32_H
#define BITNET_X86_CRC32_H

#include "common.h"

INLINE __m128i crc32_load(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)p);
}

INLINE __m128i crc32_fold(__m128i a, __m128i powers, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(a, powers, 0x00);
    const __m128i high = _mm_clmulepi64_si128(a, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

static uint32_t crc32(uint32_t crc, const uint8_t *p, size_t n) {
    /* x^(n+32) and x^(n-32) mod P for n = 512 and 128, bit-reflected */
    const __m128i by_512 = _mm_set_epi64x(0x1C6E41596, 0x154442BD4);
    const __m128i by_128 = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);
    crc = ~crc;
    if (n >= 64) {
        __m128i a = _mm_xor_si128(crc32_load(p), _mm_cvtsi32_si128((int)crc));
        __m128i b = crc32_load(p + 16), c = crc32_load(p + 32), d = crc32_load(p + 48);
        for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
            a = crc32_fold(a, by_512, crc32_load(p));
            b = crc32_fold(b, by_512, crc32_load(p + 16));
            c = crc32_fold(c, by_512, crc32_load(p + 32));
            d = crc32_fold(d, by_512, crc32_load(p + 48));
        }
        a = crc32_fold(crc32_fold(crc32_fold(a, by_128, b), by_128, c), by_128, d);
        for (; n >= 16; p += 16, n -= 16)
            a = crc32_fold(a, by_128, crc32_load(p));
        uint8_t rest[16];
        _mm_storeu_si128((__m128i *)rest, a);
        crc = bn_crc32_bytes(0, rest, sizeof rest);
    }
    return ~bn_crc32_bytes(crc, p, n);
}

#endif
