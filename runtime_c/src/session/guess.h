/* SPDX-License-Identifier: MIT
 *
 * guess.h: what the model's draft (draft.h) says comes next, and how it keeps up with a text.
 *
 * The draft's row of a token waits for the next token. So a session keeps the states of its last
 * tokens, its trail, until they are computed together: before the first guess, when there is no
 * more room, or with the next piece of a prompt. A text whose states were not kept, one that was
 * scored or embedded, or for which there was no memory, has no guesses from there on.
 */
#ifndef BITNET_GUESS_H
#define BITNET_GUESS_H

#include "session.h"
#include "workspace.h"

/* n tokens are about to be computed, the first of them `next`: rows that have to be before. In a
 * turn, with no rows in the workspace yet, as they are written to. */
void bn_trail_begin(bn_session *s, bn_workspace *w, int32_t n, int32_t next);

/* The token at a place was computed, and counts: x behind its last layer. */
void bn_trail_add(bn_session *s, int32_t place, const float *x);

/* The last n tokens were: these are rows 0 to n - 1 of the workspace, which are lost. */
void bn_trail_end(bn_session *s, bn_workspace *w, int32_t n);

/* Guesses at what comes behind `token`, which comes next: at most `most`, at least one if any is
 * tried, each with its confidence. `careful`: as long as they are worth it. Of the session there is
 * memory for them. Returns how many, and in *made how many the draft computed. */
int32_t bn_guess(bn_session *s, bn_workspace *w, const bn_sampler *sampler, int32_t token,
                 int32_t most, int careful, int32_t *guesses, float *confidences, int32_t *made);

#endif
