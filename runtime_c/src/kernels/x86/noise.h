/* SPDX-License-Identifier: MIT
 *
 * noise.h: the noise of tokens (../noise.h). Each 32-bit word of Philox occupies a 64-bit lane, of
 * which only the lower half counts: products ignore the upper half.
 */
#ifndef BITNET_X86_NOISE_H
#define BITNET_X86_NOISE_H

#include "../noise.h"
#include "register.h"

INLINE quads quads_fill(uint64_t word) {
    return word - (quads){0};
}

static void noise(double *u, const uint32_t *tokens, size_t n, uint64_t seed, uint32_t position) {
    enum { AT_ONCE = sizeof(quads) / sizeof(uint64_t) };
    typedef double doubles __attribute__((vector_size(sizeof(quads))));
    const quads half = quads_fill(UINT32_MAX);
    size_t i = 0;
    for (; i + AT_ONCE <= n; i += AT_ONCE) {
        const quads token = quads_widen(tokens + i), odd = quads_fill(0) - (token & 1);
        quads a = token >> 1, b = quads_fill(position), c = quads_fill(0), d = quads_fill(0);
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        UNROLL
        for (int round = 0; round < 10; round++, k0 += BN_PHILOX_K0, k1 += BN_PHILOX_K1) {
            const quads left = quads_multiply(a, quads_fill(BN_PHILOX_M0));
            const quads right = quads_multiply(c, quads_fill(BN_PHILOX_M1));
            a = (right >> 32) ^ b ^ quads_fill(k0);
            b = right;
            c = (left >> 32) ^ d ^ quads_fill(k1);
            d = left;
        }
        const quads upper = a ^ ((a ^ c) & odd), lower = b ^ ((b ^ d) & odd);
        const quads r = upper << 32 >> 12 | (lower & half) >> 12;
        /* the bit pattern of the double 2^52 + r, which is exact */
        const doubles number = (doubles)(r | quads_fill(UINT64_C(0x433) << 52)) - 0x1p52;
        const doubles between = (number + 0.5) * 0x1p-52;
        memcpy(u + i, &between, sizeof between);
    }
    bn_noise at = bn_noise_at(seed, position);
    for (; i < n; i++)
        u[i] = bn_noise_of(&at, tokens[i]);
}

#endif
