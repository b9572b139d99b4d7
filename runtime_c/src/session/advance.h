/* SPDX-License-Identifier: MIT
 *
 * advance.h: continues several texts in shared passes. Each contributes rows for its known tokens
 * and for guesses of the tokens it will choose next.
 */
#ifndef BITNET_ADVANCE_H
#define BITNET_ADVANCE_H

#include "batch.h"

/* In a turn: one pass over the n entries whose status is BN_OK, as far as there is room. `step`:
 * for bn_session_step, which keeps only right guesses of what is chosen. Returns how many entries
 * were handled, at least one. */
int32_t bn_advance(bn_batch *b, bn_entry *entries, int32_t n, int step);

/* Number of an entry's tokens computed in the pass, its last ones; those before must already be
 * held. */
int32_t bn_count_tokens(const bn_entry *entry);

/* The sampler for the i-th token that a call chooses, with its row of `allowed`. */
bn_sampler bn_nth_sampler(const bn_sampler *sampler, size_t i, uint32_t vocab);

#endif
