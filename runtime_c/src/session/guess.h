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

/* The last n tokens were: these are the rows of the workspace from `first` on, which are lost, and
 * those before them. */
void bn_trail_end(bn_session *s, bn_workspace *w, size_t first, int32_t n);

enum { BN_GUESSES = 16, BN_GUESSERS = 32 };

/* A text, and what is guessed of it behind `token`, which comes next: at most `most` tokens. */
typedef struct bn_guesses {
    bn_session *session;
    const bn_sampler *sampler;
    int32_t token, most;
    int32_t n; /* how many there are */
    int32_t tokens[BN_GUESSES];
    float confidences[BN_GUESSES];
    double path; /* the probability that all are right */
    size_t row;  /* that has its state */
} bn_guesses;

/* Guess for n texts, at most BN_GUESSERS, together: a row of each is a round. There is memory for
 * them in each session. pass: that is to compute them, of which they are made as long as they are
 * worth it; NULL: all that are asked for. In a turn, with no rows yet. */
void bn_guess(bn_guesses *const *texts, int32_t n, bn_workspace *w, bn_outlook *pass);

#endif
