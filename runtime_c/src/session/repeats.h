/* SPDX-License-Identifier: MIT
 *
 * repeats.h: guesses that cost nothing to make (prompt lookup decoding): what followed the last
 * tokens where they occurred in the text before. How reliable they are is learned per text,
 * including the end of its prompt, whether they are computed or not.
 */
#ifndef BITNET_REPEATS_H
#define BITNET_REPEATS_H

#include "bitnet_runtime.h"
#include "speculation.h"

enum { BN_REPEATS = 8 };

/* Where a text repeats itself, and how often it continued as before. */
typedef struct bn_repeats {
    int32_t seen;        /* tokens of the text that were processed */
    int32_t back, agree; /* the last `agree` tokens, at most BN_REPEATS, also occur `back` positions
                          * earlier; 0: none */
    double offered[BN_REPEATS], right[BN_REPEATS]; /* by agree - 1: tokens that followed such a
                                                    * match, and those that were the same again */
    int32_t rests; /* likely guesses skipped since the last one computed */
} bn_repeats;

/* Update for a text of n tokens, the latest of which may be new. */
void bn_repeats_see(bn_repeats *r, const int32_t *tokens, int32_t n);

/* Guess what follows them, into tokens[n..), at most `most`. Returns how many. probabilities: for
 * each, that it and those before it are right. */
int32_t bn_repeats_guess(const bn_repeats *r, int32_t *tokens, int32_t n, int32_t most,
                         double *probabilities);

/* Guess what follows `token`, the next token of a text that has memory for it and `most` more:
 * guesses go to s->tokens after its position. Returns as many as are worth their rows, and adds
 * them to the budget; 0 if the model's draft promises more. */
int32_t bn_repeats_draft(bn_session *s, int32_t token, int32_t most, bn_draft_budget *budget);

#endif
