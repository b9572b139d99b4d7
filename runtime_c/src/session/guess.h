/* SPDX-License-Identifier: MIT
 *
 * guess.h: draft tokens of speculative decoding: guesses of the next tokens by the model's draft
 * (draft.h).
 */
#ifndef BITNET_GUESS_H
#define BITNET_GUESS_H

#include "session.h"
#include "workspace.h"

enum { BN_GUESSES = 16, BN_GUESSERS = 32 };
_Static_assert((int)BN_GUESSES <= BN_TIMED_ROWS && (int)BN_GUESSERS <= BN_TIMED_ROWS,
               "speculation.c plans for no more guesses or texts");

/* A text, and at most `most` guesses of what follows `token`, its next token. */
typedef struct bn_guesses {
    bn_session *session;
    const bn_sampler *sampler;
    int32_t token, most;
    int32_t n; /* guesses so far */
    int32_t tokens[BN_GUESSES];
    float confidences[BN_GUESSES]; /* draft probabilities */
    double joint;                  /* the probability that all are right */
    size_t row;                    /* workspace row of its state */
    size_t width;                  /* only tokens [0, width) are guessed */
    bn_status status;              /* of the last guess */
} bn_guesses;

/* Whether the model has a draft and it is up to date with the text. */
int bn_can_guess(const bn_session *s);

/* Guess for n texts together, at most BN_GUESSERS, in rounds of one row per text. Their sessions
 * must have reserved memory. budget: of the pass that will verify the guesses, which are made as
 * long as they are worth it; NULL: make all that were requested. In a turn, before any rows are
 * added. Returns the status of the last round: whoever verifies does without the guesses of one
 * that failed. */
bn_status bn_guess(bn_guesses *const *texts, int32_t n, bn_workspace *w, bn_draft_budget *budget);

#endif
