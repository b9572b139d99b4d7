/* SPDX-License-Identifier: MIT
 *
 * backlog.h: how the KV cache of the model's draft (draft.h) keeps up with a text.
 *
 * The draft's row for a token needs the next token. So a session keeps the states of its last
 * tokens, its backlog, until their rows are computed together: before the first guess, when the
 * backlog is full, or with the next piece of a prompt. A text whose states were not kept, because
 * it was scored or embedded or memory ran out, gets no guesses from then on.
 */
#ifndef BITNET_BACKLOG_H
#define BITNET_BACKLOG_H

#include "session.h"
#include "workspace.h"

/* Call before n tokens are computed, the first of them `next`: computes the draft's rows that must
 * come first. In a turn, before any rows are added, as the workspace is overwritten. */
void bn_backlog_begin(bn_session *s, bn_workspace *w, int32_t n, int32_t next);

/* The token at `place` was computed and is kept: add its state. x: output of the last layer. */
void bn_backlog_add(bn_session *s, int32_t place, const float *x);

/* The last n tokens were computed: add the states of the workspace rows from `first` on. These rows
 * and those before them may be overwritten. */
void bn_backlog_end(bn_session *s, bn_workspace *w, size_t first, int32_t n);

/* Whether the draft's rows and the backlog together cover all tokens before `position`. */
int bn_backlog_follows(const bn_session *s, int32_t position);

/* The i-th state of the backlog; after the last there is room for two more. */
float *bn_backlog_state(const bn_session *s, int32_t i);

/* Write draft rows for n positions of a text from `place` on; the token after each position must be
 * in s->tokens. stride: floats from state to state */
void bn_backlog_rows(bn_workspace *w, size_t first, bn_session *s, int32_t place, int32_t n,
                     const float *states, size_t stride);

/* The draft has taken all but the last `left` states of the backlog; drop them. */
void bn_backlog_shorten(bn_session *s, int32_t left);

/* Compute the draft's rows for all but the last `left` states; on failure the text gets no more
 * guesses. */
void bn_backlog_take(bn_session *s, bn_workspace *w, int32_t left);

#endif
