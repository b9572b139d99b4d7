/* SPDX-License-Identifier: MIT
 *
 * choose.h: chooses the next token from the state of a session's last one.
 */
#ifndef BITNET_CHOOSE_H
#define BITNET_CHOOSE_H

#include "session.h"
#include "workspace.h"

/* Choose a token. In a turn, unless all logits are available: computes those that the sampler
 * needs, overwriting row 0 of the workspace's x. logit: receives the token's logit before bias and
 * penalties; or NULL. */
bn_status bn_choose(bn_session *s, bn_workspace *w, const bn_sampler *sampler, int32_t *token,
                    float *logit);

#endif
