/* SPDX-License-Identifier: MIT
 *
 * guess.c: see guess.h.
 *
 * A draft and the text meet the same noise (sampler.h), so that a guess is sampled as the token
 * will be, and is right about as often as can be whatever the temperature.
 */
#include "guess.h"

#include <math.h>
#include <string.h>

#include "choose.h"
#include "forward.h"
#include "head.h"
#include "kernels/elementary.h"
#include "logits.h"
#include "turn.h"

/* Whether it has the states of all tokens that the draft has not. */
static int follows(const bn_session *s, int32_t position) {
    return s->stack->draft && s->drafted + s->trailing == position;
}

static float *state_of(const bn_session *s, int32_t i) {
    return s->trail + (size_t)i * s->stack->config.dim;
}

/* Rows of the draft from a place on; the tokens behind each stand in the text. Their results are
 * the first rows of the workspace, of the last piece. */
static bn_status run(bn_session *s, bn_workspace *w, int32_t place, int32_t n, const float *states,
                     int32_t *last) {
    const size_t D = s->stack->config.dim;
    bn_status status = bn_cache_prepare(&s->cache, (size_t)place, (size_t)n);
    for (int32_t first = 0; first < n && !status; first += s->batch) {
        size_t rows = 0;
        for (int32_t i = first; i < n && rows < (size_t)s->batch; i++, rows++)
            w->rows[rows] = (bn_row){.session = s,
                                     .cache = &s->cache,
                                     .position = place + i,
                                     .token = s->tokens[place + i + 1],
                                     .state = states + (size_t)i * D};
        status = bn_forward(s->model, s->stack->draft, w, rows, NULL);
        *last = (int32_t)rows - 1;
    }
    return status;
}

/* The draft takes the trail. Returns the row of the workspace that has its last result, or -1. */
static int32_t take_trail(bn_session *s, bn_workspace *w, int32_t next) {
    int32_t last = -1;
    s->tokens[s->position] = next;
    const bn_status status = run(s, w, s->drafted, s->trailing, s->trail, &last);
    s->drafted += status ? 0 : s->trailing;
    s->trailing = 0;
    return status ? -1 : last;
}

void bn_trail_begin(bn_session *s, bn_workspace *w, int32_t n, int32_t next) {
    if (follows(s, s->position) && s->trailing > 0 && s->trailing + n > BN_TRAIL)
        take_trail(s, w, next);
}

void bn_trail_add(bn_session *s, int32_t place, const float *x) {
    if (!follows(s, place) || s->trailing == BN_TRAIL)
        return;
    bn_norm_row(&s->model->kernels, &s->stack->final_norm, state_of(s, s->trailing), x,
                s->stack->config.dim);
    s->trailing++;
}

void bn_trail_end(bn_session *s, bn_workspace *w, int32_t n) {
    const size_t D = s->stack->config.dim;
    const int32_t place = s->position - n;
    int32_t last;
    if (!follows(s, place))
        return;
    if (s->trailing + n <= BN_TRAIL) {
        for (int32_t i = 0; i < n; i++)
            bn_trail_add(s, place + i, w->x + (size_t)i * D);
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        float *x = i < n - 1 ? w->x + (size_t)i * D : s->trail;
        bn_norm_row(&s->model->kernels, &s->stack->final_norm, x, w->x + (size_t)i * D, D);
    }
    if (run(s, w, place, n - 1, w->x, &last))
        return;
    s->drafted = s->position - 1;
    s->trailing = 1;
}

/* The token that the draft's state `hidden` gives behind the first `position` tokens of the text;
 * its share of the probability of all. */
static bn_status sample(const bn_session *s, bn_workspace *w, const bn_sampler *sampler,
                        float *hidden, int32_t position, int32_t *token, float *confidence) {
    const bn_kernels *kernels = &s->model->kernels;
    const bn_stack *draft = s->stack->draft;
    const uint32_t V = draft->config.vocab_size;
    bn_session guesser = {.model = s->model,
                          .stack = draft,
                          .tokens = s->tokens,
                          .position = position,
                          .hidden = hidden,
                          .logits = w->scores,
                          .ready = BN_READY_HIDDEN,
                          .sampler_scratch = s->sampler_scratch,
                          .seed = s->seed};
    bn_status status;
    if (bn_head_screens(draft)) {
        bn_load_hidden(&guesser, w);
        status = bn_head_input(s->model, draft, w, 0, 1);
        if (!status)
            bn_head_estimate(s->model, draft, w, 0, 1, guesser.logits);
        guesser.ready = BN_READY_ESTIMATES;
    } else {
        status = bn_full_logits(&guesser, w);
    }
    if (status)
        return status;
    const double all = bn_log_sum(kernels, guesser.logits, V);
    status = bn_choose(&guesser, w, sampler, token);
    if (!status)
        *confidence = fminf(1.0f, bn_exp((float)((double)guesser.logits[*token] - all)));
    return status;
}

int32_t bn_guess(bn_session *s, bn_workspace *w, const bn_sampler *sampler, int32_t token,
                 int32_t most, int careful, int32_t *guesses, float *confidences, int32_t *made) {
    const size_t D = s->stack->config.dim;
    const bn_pace *pace = &s->model->pace;
    float *own = state_of(s, BN_TRAIL), *hidden = own + D;
    bn_chain chain = bn_chain_begin();
    *made = 0;
    if (careful && bn_luck_is_out(&s->luck))
        s->trailing = 0; /* keeping up takes time, too */
    if (!follows(s, s->position) || s->trailing == 0 || most < 1 ||
        (careful && !bn_pace_guess(pace, &s->luck, &chain)))
        return 0;
    int32_t row = take_trail(s, w, token), n = 0;
    while (row >= 0) {
        memcpy(hidden, w->x + (size_t)row * D, D * sizeof *hidden);
        if (sample(s, w, sampler, hidden, s->position + 1 + n, &guesses[n], &confidences[n]))
            break;
        s->tokens[s->position + 1 + n] = guesses[n];
        ++*made;
        if (careful && !bn_pace_take(pace, &s->luck, &chain, (double)confidences[n]))
            break;
        if (++n == most || (careful && !bn_pace_guess(pace, &s->luck, &chain)))
            break;
        bn_norm_row(&s->model->kernels, &s->stack->draft->final_norm, own, hidden, D);
        if (run(s, w, s->position + n - 1, 1, own, &row))
            break;
    }
    return n;
}

bn_status bn_session_guess(bn_session *s, const bn_sampler *sampler, int32_t token, int32_t most,
                           int32_t *guesses, float *confidences, int32_t *n) {
    BN_STANDARD_FLOATS;
    if (!s || !guesses || !confidences || !n || most < 0)
        return BN_ERR_ARGUMENT;
    bn_status status = bn_check_tokens(s, &token, 1);
    const int32_t room = s->n_ctx - s->position - 1, trailing = s->trailing;
    most = most < room ? most : room;
    *n = 0;
    if (status || !s->stack->draft || most < 1)
        return status;
    status = bn_session_reserve(s, most + 1);
    if (status)
        return status;
    int32_t made;
    bn_workspace *w = bn_turn_begin(s->model);
    *n = bn_guess(s, w, sampler, token, most, 0, guesses, confidences, &made);
    bn_turn_end(s->model);
    if (trailing > 0 && s->drafted == s->position) { /* the next token may be another */
        memmove(s->trail, state_of(s, trailing - 1), s->stack->config.dim * sizeof *s->trail);
        s->drafted--;
        s->trailing = 1;
    }
    return BN_OK;
}
