/* SPDX-License-Identifier: MIT
 *
 * sampler.h: from a row of logits to one token. The parameters are those of bn_sampler in the
 * public header; this specifies the details, because the same seed must give the same token on
 * every machine:
 *
 * 1. x = logits; bias_values are added; then for each token among the last penalty_window:
 *    x = x > 0 ? x / repeat_penalty : x * repeat_penalty, and
 *    x -= presence_penalty + frequency_penalty * occurrences. Tokens that are not allowed get
 *    x = -INFINITY.
 * 2. temperature 0: the largest x, lowest id on a tie; there is no noise.
 *    Otherwise w = bn_exp((x - max x) / temperature).
 * 3. top_k keeps the k largest x (all, when there are fewer); top_p then the fewest of these,
 *    largest first, whose w sum to top_p of theirs; min_p then those with w >= min_p. Ties go
 *    to the lower id. -INFINITY is never kept.
 * 4. Each token has its own random number u (noise.h). Of those kept, the one with the least
 *    -bn_log(u) / w is chosen, lowest id on a tie. -ln u is an exponentially distributed waiting
 *    time with rate 1, so -ln(u) / w has rate w, and a token arrives first with probability
 *    w / sum of w. In logarithms this is the Gumbel-max trick: the largest x / temperature + g,
 *    where g = -ln(-ln u) has a Gumbel distribution.
 *
 * Two rows of logits for the same position use the same noise. The more similar they are, the more
 * often they give the same token: with probability (1 - d) / (1 + d) at least, if their
 * distributions differ by d in total variation. So a guess, sampled with the seed and position of
 * the actual row, is right about as often as a guess can be.
 */
#ifndef BITNET_SAMPLER_H
#define BITNET_SAMPLER_H

#include "bitnet_runtime.h"
#include "kernels/kernels.h"

/* Bytes of scratch memory bn_sample needs for a vocabulary; malloc's alignment is enough. */
size_t bn_sample_scratch_size(uint32_t vocab);

/* The logits of n tokens: x[i] belongs to tokens[i], in ascending order; NULL: all n tokens of a
 * vocabulary. Tokens left out must not be the ones chosen, nor have a bias or penalty. */
typedef struct bn_choices {
    const float *x;
    const uint32_t *tokens;
    uint32_t n;
} bn_choices;

static inline uint32_t bn_token_at(const bn_choices *of, size_t i) {
    return of->tokens ? of->tokens[i] : (uint32_t)i;
}

/* Whether a row of bn_sampler.allowed has the bit of a token. */
static inline int bn_allows(const uint32_t *row, uint32_t token) {
    return (int)(row[token / 32] >> token % 32 & 1);
}

/* A copy of the sampler with neutral values (1) where 0 means off; NULL: temperature 0. */
bn_sampler bn_sampler_or_neutral(const bn_sampler *sampler);

/* BN_ERR_ARGUMENT: a parameter is NaN or out of range, or a bias token is not in the vocabulary. */
bn_status bn_check_sampler(const bn_sampler *sampler, uint32_t vocab);

/* Sample one token. vocab in 1..2^31-1; sampler as in the public header. tokens: the text so far,
 * oldest first, BN_NO_TOKEN for a vector, used by the penalties only; may be NULL if n_tokens is 0.
 * n_tokens is the position of the new token. *token is set on success only; scratch holds nothing
 * between calls. Fails with BN_ERR_ARGUMENT (bn_check_sampler), BN_ERR_TOKEN (an invalid entry in
 * `tokens`), or BN_ERR_NUMERIC (an x is NaN or +infinity, or all are -infinity). */
bn_status bn_sample(const bn_sampler *sampler, const bn_choices *logits, uint32_t vocab,
                    const int32_t *tokens, int32_t n_tokens, uint64_t seed, void *scratch,
                    const bn_kernels *kernels, int32_t *token);

#endif
