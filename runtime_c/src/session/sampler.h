/* SPDX-License-Identifier: MIT
 *
 * sampler.h: from a row of logits to one token. The parameters are those of bn_sampler in the
 * public header; here is what it leaves open, because the same seed must give the same token on
 * every machine:
 *
 * 1. x = logits; bias_values are added; then for each token among the last penalty_window:
 *    x = x > 0 ? x / repeat_penalty : x * repeat_penalty, and
 *    x -= presence_penalty + frequency_penalty * occurrences.
 * 2. temperature 0: the largest x, lowest id on a tie; no random number is used.
 *    Otherwise w = bn_exp((x - max x) / temperature).
 * 3. top_k keeps the k largest x (all, when there are fewer); top_p then the fewest of these,
 *    largest first, whose w sum to top_p of theirs; min_p then those with w >= min_p. Ties go
 *    to the lower id. -INFINITY is never kept.
 * 4. One step of splitmix64 gives u = (next >> 11) / 2^53. The token is the first whose running
 *    sum of w, in double, exceeds u times the sum. They are summed by id when the last three are
 *    all off (0 or >= vocab, 1, 0), else by falling x.
 */
#ifndef BITNET_SAMPLER_H
#define BITNET_SAMPLER_H

#include "bitnet_runtime.h"
#include "kernels/kernels.h"

/* Bytes of scratch memory bn_sample needs for a vocabulary; malloc's alignment is enough. */
size_t bn_sample_scratch_size(uint32_t vocab);

/* A sampler with 1 where 0 means that a field is off; NULL: temperature 0. */
bn_sampler bn_sampler_or_neutral(const bn_sampler *sampler);

/* logits: float[vocab], vocab in 1..2^31-1; sampler as in the public header. tokens: the text so
 * far, oldest first, BN_NO_TOKEN where there is none, read by the penalties only; may be NULL when
 * n_tokens is 0. *rng advances by one draw and *token is set on success only; scratch holds nothing
 * between calls. Fails with BN_ERR_ARGUMENT (a parameter is NaN or out of range, a bias token is
 * not in the vocabulary), BN_ERR_TOKEN (one of `tokens` is not), or BN_ERR_NUMERIC (some x is NaN
 * or +infinity, or all are -infinity). */
bn_status bn_sample(const bn_sampler *sampler, const float *logits, uint32_t vocab,
                    const int32_t *tokens, int32_t n_tokens, uint64_t *rng, void *scratch,
                    const bn_kernels *kernels, int32_t *token);

#endif
