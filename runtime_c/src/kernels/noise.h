/* SPDX-License-Identifier: MIT
 *
 * noise.h: random numbers for sampling. Each depends only on a seed, a position in the text and a
 * token, so it does not matter which are drawn, when, or in what order.
 */
#ifndef BITNET_NOISE_H
#define BITNET_NOISE_H

#include <stdint.h>

/* Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
 * (2011). Counters or keys that differ in a single bit give unrelated words. */
#define BN_PHILOX_M0 0xD2511F53u
#define BN_PHILOX_M1 0xCD9E8D57u
#define BN_PHILOX_K0 0x9E3779B9u /* the golden ratio and sqrt(3) - 1, in 32 bits */
#define BN_PHILOX_K1 0xBB67AE85u
void bn_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

/* Generator of the noise of all tokens at a position; caches the words of the last pair of
 * tokens. */
typedef struct bn_noise {
    uint64_t seed;
    uint32_t position;
    uint32_t pair; /* token id / 2 of the cached words */
    uint32_t words[4];
} bn_noise;

bn_noise bn_noise_at(uint64_t seed, uint32_t position);

/* Uniform in (0, 1): (r + 1/2) / 2^52, where r is the upper 52 bits of two Philox words, the more
 * significant one first: words 0 and 1 for an even token id, 2 and 3 for an odd one. The counter is
 * (id / 2, position, 0, 0); the key is the seed, less significant word first. */
double bn_noise_of(bn_noise *noise, uint32_t token);

#endif
