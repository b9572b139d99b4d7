/* SPDX-License-Identifier: MIT
 *
 * guess.h: what the model's draft (draft.h) says comes next.
 */
#ifndef BITNET_GUESS_H
#define BITNET_GUESS_H

#include "session.h"
#include "workspace.h"

enum { BN_GUESSES = 16, BN_GUESSERS = 32 };

/* A text, and what is guessed of it behind `token`, which comes next: at most `most` tokens. */
typedef struct bn_guesses {
    bn_session *session;
    const bn_sampler *sampler;
    int32_t token, most;
    int32_t n; /* how many there are */
    int32_t tokens[BN_GUESSES];
    float confidences[BN_GUESSES];
    double path;      /* the probability that all are right */
    size_t row;       /* that has its state */
    size_t width;     /* tokens [0, width) are guessed */
    bn_status status; /* of the last guess */
} bn_guesses;

/* Whether there is a draft that follows the text. */
int bn_can_guess(const bn_session *s);

/* Guess for n texts, at most BN_GUESSERS, together: a row of each is a round. There is memory for
 * them in each session. pass: that is to compute them, of which they are made as long as they are
 * worth it; NULL: all that are asked for. In a turn, with no rows yet. */
void bn_guess(bn_guesses *const *texts, int32_t n, bn_workspace *w, bn_outlook *pass);

#endif
