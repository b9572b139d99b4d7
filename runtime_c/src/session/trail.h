/* SPDX-License-Identifier: MIT
 *
 * trail.h: how the model's draft (draft.h) keeps up with a text.
 *
 * The draft's row of a token waits for the next token. So a session keeps the states of its last
 * tokens, its trail, until they are computed together: before the first guess, when there is no
 * more room, or with the next piece of a prompt. A text whose states were not kept, one that was
 * scored or embedded, or for which there was no memory, has no guesses from there on.
 */
#ifndef BITNET_TRAIL_H
#define BITNET_TRAIL_H

#include "session.h"
#include "workspace.h"

/* n tokens are about to be computed, the first of them `next`: rows that have to be before. In a
 * turn, with no rows in the workspace yet, as they are written to. */
void bn_trail_begin(bn_session *s, bn_workspace *w, int32_t n, int32_t next);

/* The token at a place was computed, and counts: x behind its last layer. */
void bn_trail_add(bn_session *s, int32_t place, const float *x);

/* The last n tokens were: these are the rows of the workspace from `first` on, which are lost, and
 * those before them. */
void bn_trail_end(bn_session *s, bn_workspace *w, size_t first, int32_t n);

/* Whether the trail has the states of all tokens up to a place that the draft has not. */
int bn_trail_follows(const bn_session *s, int32_t position);

/* Its i-th state; behind it is room for two more. */
float *bn_trail_state(const bn_session *s, int32_t i);

/* Rows of the draft from a place of a text on; the tokens behind each stand in the text. */
void bn_trail_rows(bn_workspace *w, size_t first, bn_session *s, int32_t place, int32_t n,
                   const float *states);

/* The draft has all of the trail but the last `left`, which come first in it from now on. */
void bn_trail_shorten(bn_session *s, int32_t left);

/* It takes that; or the text has no guesses any more. */
void bn_trail_take(bn_session *s, bn_workspace *w, int32_t left);

#endif
