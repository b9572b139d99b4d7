/* SPDX-License-Identifier: MIT
 *
 * routing.h: which experts a token is routed to, and with what weights (shares).
 *
 *     p = softmax over all experts
 *     the k largest, the first on ties;  their shares are p, or p divided by their sum
 */
#ifndef BITNET_ROUTING_H
#define BITNET_ROUTING_H

#include "kernels/kernels.h"

/* Number of experts, and how many a token takes. */
typedef struct bn_choice {
    size_t experts, taken; /* 1 <= taken <= experts <= 65,534 */
    int32_t normalize;     /* 1: the shares sum to 1 */
} bn_choice;

/* Select experts by the router's logits [experts], which become p. expert, share: [taken], largest
 * share first; keys: [experts] of scratch. Returns 0 if a logit is not finite: the shares are then
 * meaningless, but the experts are still distinct and below `experts`. */
int bn_route(const bn_kernels *kernels, const bn_choice *choice, float *logits, uint64_t *keys,
             uint32_t *expert, float *share);

#endif
