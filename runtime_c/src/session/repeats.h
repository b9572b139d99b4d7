/* SPDX-License-Identifier: MIT
 *
 * repeats.h: guesses that cost nothing to make: what came behind the last tokens when they stood in
 * the text before. How far they can be relied on is learned of each text, the end of its prompt
 * included, whether they are computed or not.
 */
#ifndef BITNET_REPEATS_H
#define BITNET_REPEATS_H

#include "session.h"
#include "workspace.h"

/* The text has n tokens, of which it may not have seen the last. */
void bn_repeats_see(bn_repeats *r, const int32_t *tokens, int32_t n);

/* Guesses of what comes behind them, into tokens[n..), at most `most`: how many. gains: the
 * probability of each that it and those before are right. */
int32_t bn_repeats_guess(const bn_repeats *r, int32_t *tokens, int32_t n, int32_t most,
                         double *gains);

/* `token` comes next in a text, which has memory for it and `most` tokens behind: what is guessed
 * of these stands in s->tokens, behind its place. As many as are worth their rows of the pass,
 * which has them then: 0 where the model's draft promises more. */
int32_t bn_repeats_offer(bn_session *s, int32_t token, int32_t most, bn_outlook *pass);

#endif
