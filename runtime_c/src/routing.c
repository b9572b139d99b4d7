/* SPDX-License-Identifier: MIT
 *
 * routing.c: see routing.h.
 */
#include "routing.h"

#include <math.h>
#include <string.h>

/* Larger for a larger p >= 0; on ties, for the first expert. All keys are distinct, whatever p
 * is. */
static uint64_t key_of(float p, size_t expert) {
    uint32_t bits;
    memcpy(&bits, &p, sizeof bits);
    return (uint64_t)bits << 32 | (UINT32_MAX - (uint32_t)expert);
}

static uint32_t expert_of(uint64_t key) {
    return UINT32_MAX - (uint32_t)key;
}

/* Sift the key at a place of a heap down. */
static void sink(uint64_t *heap, size_t n, size_t at) {
    const uint64_t key = heap[at];
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        child += child + 1 < n && heap[child + 1] > heap[child];
        if (heap[child] < key)
            break;
        heap[at] = heap[child];
    }
    heap[at] = key;
}

/* A heap takes E + k·log E steps, so a hostile file cannot cause E·k. */
static void take_largest(uint64_t *keys, size_t n, size_t k, uint32_t *expert) {
    for (size_t at = n / 2; at-- > 0;)
        sink(keys, n, at);
    for (size_t j = 0; j < k; j++) {
        expert[j] = expert_of(keys[0]);
        keys[0] = keys[--n];
        sink(keys, n, 0);
    }
}

int bn_route(const bn_kernels *kernels, const bn_choice *choice, float *logits, uint64_t *keys,
             uint32_t *expert, float *share) {
    const size_t n = choice->experts;
    float total = 0;
    int finite = 1;
    for (size_t e = 0; e < n; e++)
        finite &= isfinite(logits[e]) != 0;
    const float sum = kernels->vectors.exp_sum(logits, n, kernels->vectors.max(logits, n));
    for (size_t e = 0; e < n; e++) {
        logits[e] /= sum;
        keys[e] = key_of(logits[e], e);
    }
    take_largest(keys, n, choice->taken, expert);
    for (size_t j = 0; j < choice->taken; j++) {
        share[j] = logits[expert[j]];
        total += share[j];
    }
    for (size_t j = 0; j < choice->taken && choice->normalize; j++)
        share[j] /= total;
    return finite;
}
