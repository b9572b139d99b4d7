/* SPDX-License-Identifier: MIT
 *
 * routing.h: which experts a token takes, and with what shares.
 *
 *     p = softmax over all experts
 *     the k largest, of equal ones the first;  their shares are p, or p divided by their sum
 */
#ifndef BITNET_ROUTING_H
#define BITNET_ROUTING_H

#include "kernels/kernels.h"

/* Of how many a token takes how many. */
typedef struct bn_choice {
    size_t experts, taken; /* 1 <= taken <= experts <= 65,534 */
    int32_t normalize;     /* the shares add up to 1 */
} bn_choice;

/* Take experts by the router's logits [experts], which become p. expert, share: [taken], the
 * largest share first; keys: [experts] of scratch. Returns 0 when a logit is not finite: then the
 * shares are worth nothing, but the experts are still distinct and below `experts`. */
int bn_route(const bn_kernels *kernels, const bn_choice *choice, float *logits, uint64_t *keys,
             uint32_t *expert, float *share);

#endif
