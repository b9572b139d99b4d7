/* SPDX-License-Identifier: MIT
 *
 * choose.h: chooses the next token of a text.
 */
#ifndef BITNET_CHOOSE_H
#define BITNET_CHOOSE_H

#include "logits.h"

/* Choose a token. In a turn, unless all logits are available: computes those that the sampler
 * needs, overwriting row 0 of the workspace's x. logit: receives the token's logit before bias and
 * penalties; or NULL. */
bn_status bn_choose(const bn_prediction *of, bn_workspace *w, const bn_sampler *sampler,
                    int32_t *token, float *logit);

#endif
