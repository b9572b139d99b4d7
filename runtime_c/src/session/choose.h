/* SPDX-License-Identifier: MIT
 *
 * choose.h: the next token, of what a session has of its last one.
 */
#ifndef BITNET_CHOOSE_H
#define BITNET_CHOOSE_H

#include "session.h"
#include "workspace.h"

/* Computes what the sampler needs of the logits, which takes a turn, unless all of them are there;
 * row 0 of the workspace's x is lost. logit: of the token, before any bias and penalty; or NULL. */
bn_status bn_choose(bn_session *s, bn_workspace *w, const bn_sampler *sampler, int32_t *token,
                    float *logit);

#endif
