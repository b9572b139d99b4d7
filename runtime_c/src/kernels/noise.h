/* SPDX-License-Identifier: MIT
 *
 * noise.h: the random numbers of sampling. Each follows from a seed, a position in a text and a
 * token alone, so that it does not matter which are asked for, when, or in what order.
 */
#ifndef BITNET_NOISE_H
#define BITNET_NOISE_H

#include <stdint.h>

/* Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
 * (2011). Two counters, or two keys, that differ in a bit give words that have nothing in common.
 */
#define BN_PHILOX_M0 0xD2511F53u
#define BN_PHILOX_M1 0xCD9E8D57u
#define BN_PHILOX_K0 0x9E3779B9u /* the golden ratio and sqrt(3) - 1, in 32 bits */
#define BN_PHILOX_K1 0xBB67AE85u
void bn_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

/* The noise of the tokens at a position. */
typedef struct bn_noise {
    uint64_t seed;
    uint32_t position;
    uint32_t pair; /* of tokens, whose words these are */
    uint32_t words[4];
} bn_noise;

bn_noise bn_noise_at(uint64_t seed, uint32_t position);

/* Uniform in (0, 1): (r + 1/2) / 2^52, r the upper 52 bits of 64: the first two of four words, of
 * a token with an odd id the others, the more significant before. Their counter is (id / 2,
 * position, 0, 0), their key the seed, less significant word first. */
double bn_noise_of(bn_noise *noise, uint32_t token);

#endif
