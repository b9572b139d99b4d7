/* SPDX-License-Identifier: MIT
 *
 * advance.h: texts go on, in passes over the rows of all of them: of each the tokens that are sure,
 * and guesses of what it chooses behind.
 */
#ifndef BITNET_ADVANCE_H
#define BITNET_ADVANCE_H

#include "batch.h"

/* In a turn: one pass over those of n entries that have no status, as far as there is room. `step`:
 * for bn_session_step, of what is chosen only guesses that are right are wanted. Returns how many
 * entries were looked at, at least one. */
int32_t bn_advance(bn_batch *b, bn_entry *entries, int32_t n, int step);

/* Tokens of an entry that are computed in the pass, its last; those before have to be there. */
int32_t bn_count_tokens(const bn_entry *entry);

/* For the i-th token that a call chooses. */
bn_sampler bn_nth_sampler(const bn_sampler *sampler, size_t i, uint32_t vocab);

#endif
