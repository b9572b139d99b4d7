/* SPDX-License-Identifier: MIT
 *
 * noise.c: see noise.h.
 */
#include "noise.h"

void bn_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]) {
    uint32_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t left = (uint64_t)a * BN_PHILOX_M0, right = (uint64_t)c * BN_PHILOX_M1;
        a = (uint32_t)(right >> 32) ^ b ^ k0;
        b = (uint32_t)right;
        c = (uint32_t)(left >> 32) ^ d ^ k1;
        d = (uint32_t)left;
        k0 += BN_PHILOX_K0;
        k1 += BN_PHILOX_K1;
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

bn_noise bn_noise_at(uint64_t seed, uint32_t position) {
    return (bn_noise){.seed = seed, .position = position, .pair = UINT32_MAX};
}

double bn_noise_of(bn_noise *noise, uint32_t token) {
    if (noise->pair != token / 2) {
        noise->pair = token / 2;
        bn_philox((uint32_t[]){noise->pair, noise->position, 0, 0},
                  (uint32_t[]){(uint32_t)noise->seed, (uint32_t)(noise->seed >> 32)}, noise->words);
    }
    const uint32_t *w = &noise->words[token % 2 * 2];
    const uint64_t r = ((uint64_t)w[0] << 32 | w[1]) >> 12;
    return ((double)r + 0.5) * 0x1p-52;
}
