/* SPDX-License-Identifier: MIT
 *
 * adjust.h: bias, penalties and bans, applied to logits before sampling: rule 1 of sampler.h.
 */
#ifndef BITNET_ADJUST_H
#define BITNET_ADJUST_H

#include "sampler.h"

/* Index of a token's logit, or n if it has none. */
uint32_t bn_place_of(const bn_choices *of, uint32_t token);

/* Whether the sampler changes logits; whether it has penalties. */
int bn_adjusts(const bn_sampler *s);
int bn_has_penalties(const bn_sampler *s);

/* Set the logits of tokens that are not allowed to -INFINITY. x: the logits of `of`. */
void bn_drop_forbidden(const bn_sampler *s, const bn_choices *of, float *x);

/* x: the logits of `of`, changed in place; counts: [vocab] scratch; tokens: the n tokens of the
 * text so far. Fails with BN_ERR_TOKEN as bn_sample does, leaving x undefined. */
bn_status bn_adjust(const bn_sampler *s, const bn_choices *of, float *x, uint32_t *counts,
                    uint32_t vocab, const int32_t *tokens, int32_t n);

#endif
