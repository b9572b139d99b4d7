/* SPDX-License-Identifier: MIT
 *
 * adjust.h: what a sampler does to logits before one is chosen: rule 1 of sampler.h.
 */
#ifndef BITNET_ADJUST_H
#define BITNET_ADJUST_H

#include "sampler.h"

/* Where the logit of a token stands, or n. */
uint32_t bn_place_of(const bn_choices *of, uint32_t token);

/* Whether it does anything to them; whether penalties are part of it. */
int bn_adjusts(const bn_sampler *s);
int bn_has_penalties(const bn_sampler *s);

/* x: the logits of `of`: of what is not allowed they become -INFINITY. */
void bn_drop_forbidden(const bn_sampler *s, const bn_choices *of, float *x);

/* x: the logits of `of`, to be changed; counts: [vocab] scratch; tokens: the n of the text so far.
 * Fails with BN_ERR_TOKEN as bn_sample does, and x is then of no use. */
bn_status bn_adjust(const bn_sampler *s, const bn_choices *of, float *x, uint32_t *counts,
                    uint32_t vocab, const int32_t *tokens, int32_t n);

#endif
