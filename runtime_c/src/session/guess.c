/* SPDX-License-Identifier: MIT
 *
 * guess.c: see guess.h.
 *
 * A guess is sampled with the same noise as the token will be (sampler.h), so it is right about as
 * often as possible, whatever the temperature.
 */
#include "guess.h"

#include <math.h>
#include <string.h>

#include "backlog.h"
#include "choose.h"
#include "forward.h"
#include "head.h"
#include "sampler.h"
#include "screen.h"
#include "system/clock.h"
#include "turn.h"

/* How many tokens of the vocabulary may be guessed: a quarter of a large one, as its sketch is most
 * of what a guess reads. Ids are assigned in the order of merges, so the first are the frequent
 * ones; a text with many others, for example in another language, uses all. */
static size_t width_of(const bn_session *s, int32_t n) {
    enum { LEAST = 32768, RECENT = 1024, SHARE = 8 };
    const size_t V = s->stack->config.vocab_size, narrow = bn_max(V / 4, LEAST);
    const int32_t first = n > RECENT ? n - RECENT : 0;
    int32_t others = 0;
    if (V < 2 * narrow || !bn_head_screens(s->stack->draft))
        return V;
    for (int32_t i = first; i < n; i++)
        others += s->tokens[i] >= (int32_t)narrow;
    return others * SHARE > n - first ? V : narrow;
}

/* Compute the scores that bn_choose needs from the draft's states in the first rows, one row per
 * text. */
static bn_status score(bn_guesses *const *who, int32_t n, bn_workspace *w) {
    const bn_session *s = who[0]->session;
    const bn_stack *draft = s->stack->draft;
    const size_t V = draft->config.vocab_size;
    size_t width = 0;
    if (!bn_head_screens(draft))
        return bn_head(s->model, draft, w, (size_t)n, w->scores);
    const bn_status status = bn_head_input(s->model, draft, w, (size_t)n);
    if (status)
        return status;
    for (int32_t i = 0; i < n; i++)
        width = bn_max(width, who[i]->width);
    bn_head_estimate(s->model, draft, w, (size_t)n, width, w->scores);
    for (int32_t i = 0; i < n; i++)
        for (size_t token = who[i]->width; token < V; token++)
            w->scores[(size_t)i * V + token] = -INFINITY;
    return BN_OK;
}

/* Sample the next guess of a text from the state and scores of its row, and set its confidence: its
 * share of the total probability. */
static bn_status sample(bn_guesses *t, bn_workspace *w, float *scores) {
    const bn_session *s = t->session;
    const bn_stack *draft = s->stack->draft;
    int32_t ready = bn_head_screens(draft) ? BN_READY_ESTIMATES : BN_READY_LOGITS;
    const bn_prediction of = {.model = s->model,
                              .stack = draft,
                              .tokens = s->tokens,
                              .position = s->position + 1 + t->n,
                              .hidden = bn_backlog_state(s, BN_BACKLOG + 1),
                              .logits = scores,
                              .listed = s->listed,
                              .ready = &ready,
                              .sampler_scratch = s->sampler_scratch,
                              .seed = s->seed};
    const double all = bn_log_sum(&s->model->kernels, scores, t->width);
    float own;
    const bn_status status = bn_choose(&of, w, t->sampler, &t->tokens[t->n], &own);
    if (!status)
        t->confidences[t->n] = fminf(1.0f, bn_exp((float)((double)own - all)));
    return status;
}

typedef struct samples {
    bn_guesses *const *who;
    const bn_workspace *w;
} samples;

/* Each text on one thread, as in advance.c. */
static void sample_some(void *context, int32_t thread, size_t first, size_t end) {
    const samples *all = context;
    const size_t V = all->who[0]->session->stack->config.vocab_size;
    for (size_t i = first; i < end; i++) {
        bn_workspace w = bn_workspace_alone(all->w, i, (size_t)thread);
        all->who[i]->status = sample(all->who[i], &w, all->w->scores + i * V);
    }
}

static void sample_all(bn_guesses *const *who, int32_t n, bn_workspace *w) {
    if (n > 1)
        bn_pool_run(w->in.pool, (size_t)n, 1, sample_some, &(samples){who, w});
    else
        who[0]->status = sample(who[0], w, w->scores);
}

/* Add the rows of a round; before the first guess of a text, those of its backlog. */
static size_t add_round(bn_guesses *const *who, int32_t n, bn_workspace *w) {
    size_t rows = 0;
    for (int32_t i = 0; i < n; i++) {
        bn_session *s = who[i]->session;
        const size_t D = s->stack->config.dim;
        const int32_t more = s->pending > 0 ? s->pending : 1;
        if (s->pending > 0)
            bn_backlog_rows(w, rows, s, s->drafted, more, s->backlog, D);
        else
            bn_backlog_rows(w, rows, s, s->position + who[i]->n - 1, 1,
                            bn_backlog_state(s, BN_BACKLOG), D);
        rows += (size_t)more;
        who[i]->row = rows - 1;
    }
    return rows;
}

/* If the backlogs do not all fit, the draft takes all but the last row of each beforehand. */
static void make_room(bn_guesses *const *who, int32_t n, bn_workspace *w) {
    size_t rows = 0;
    for (int32_t i = 0; i < n; i++)
        rows += (size_t)who[i]->session->pending;
    for (int32_t i = 0; i < n && rows > w->batch; i++)
        if (who[i]->session->pending > 1)
            bn_backlog_take(who[i]->session, w, 1);
}

/* Save the resulting state of each text, and move it to the first rows. */
static void keep_states(bn_guesses *const *who, int32_t n, bn_workspace *w) {
    for (int32_t i = 0; i < n; i++) {
        bn_session *s = who[i]->session;
        const size_t D = s->stack->config.dim, stride = bn_row_stride(D);
        float *hidden = bn_backlog_state(s, BN_BACKLOG + 1);
        memcpy(hidden, w->x + who[i]->row * stride, D * sizeof *hidden);
        memcpy(w->x + (size_t)i * stride, hidden, D * sizeof *hidden);
        if (s->pending > 0) { /* its last state stays in the backlog's memory (bn_session_guess) */
            bn_backlog_shorten(s, 1);
            s->drafted++;
            s->pending = 0;
        }
    }
}

/* Compute one more guess for each text, up to its scores. */
static bn_status guess_once(bn_guesses *const *who, int32_t n, bn_workspace *w) {
    const bn_session *s = who[0]->session;
    make_room(who, n, w);
    const size_t rows = add_round(who, n, w);
    bn_status status = BN_OK;
    for (size_t i = 0; i < rows && !status; i++)
        status = bn_cache_prepare(w->rows[i].cache, (size_t)w->rows[i].position, 1);
    if (!status)
        status = bn_forward(s->model, s->stack->draft, w, rows, NULL);
    if (status)
        return status;
    keep_states(who, n, w);
    return score(who, n, w);
}

static double joint_acceptance(const bn_guesses *t) {
    return t->joint * bn_acceptance_rate(&t->session->draft_stats);
}

/* Move the texts that get one more guess to the front. Returns how many. */
static int32_t decide(bn_guesses **who, int32_t n, const bn_timings *timings,
                      const bn_draft_budget *budget) {
    double probabilities[BN_GUESSERS];
    for (int32_t i = 1; i < n; i++) /* sort by descending probability */
        for (int32_t j = i; j > 0 && joint_acceptance(who[j]) > joint_acceptance(who[j - 1]); j--) {
            bn_guesses *t = who[j];
            who[j] = who[j - 1];
            who[j - 1] = t;
        }
    for (int32_t i = 0; i < n; i++)
        probabilities[i] = joint_acceptance(who[i]);
    int32_t more = bn_plan_round(timings, budget, probabilities, n);
    for (int32_t i = 0; i < more; i++)
        who[i]->session->draft_stats.rests = 0;
    for (int32_t i = more; i < n && budget->rows + more < budget->most; i++)
        if (who[i]->n == 0 && bn_draft_retry(&who[i]->session->draft_stats)) {
            bn_guesses *t = who[i];
            who[i] = who[more];
            who[more++] = t;
        }
    return more;
}

/* Whether a text continues after its latest guess. */
static int take_guess(bn_guesses *t, bn_draft_budget *budget) {
    bn_session *s = t->session;
    const size_t D = s->stack->config.dim;
    if (t->status)
        return 0;
    s->tokens[s->position + 1 + t->n] = t->tokens[t->n];
    if (budget && !bn_draft_take(&s->model->timings, &s->draft_stats, budget, &t->joint,
                                 (double)t->confidences[t->n]))
        return 0;
    t->n++;
    bn_norm_row(&s->model->kernels, &s->stack->draft->final_norm, bn_backlog_state(s, BN_BACKLOG),
                bn_backlog_state(s, BN_BACKLOG + 1), D);
    return t->n < t->most;
}

int bn_can_guess(const bn_session *s) {
    return bn_backlog_follows(s, s->position) && s->pending > 0;
}

static int can_begin(bn_guesses *t) {
    bn_session *s = t->session;
    t->joint = 1;
    s->tokens[s->position] = t->token;
    t->width = width_of(s, s->position + 1);
    return bn_can_guess(s) && t->most > 0;
}

/* Charge a round of n texts, and keeping up for those that start with it. */
static void charge(bn_guesses *const *who, int32_t n, const bn_timings *timings) {
    for (int32_t i = 0; i < n; i++) {
        bn_session *s = who[i]->session;
        bn_charge_round(&s->draft_stats, timings, n);
        bn_charge_catch_up(&s->draft_stats, timings, s->pending > 1 ? s->pending - 1 : 0);
    }
}

bn_status bn_guess(bn_guesses *const *texts, int32_t n, bn_workspace *w, bn_draft_budget *budget) {
    bn_guesses *who[BN_GUESSERS];
    int32_t going = 0;
    bn_status status = BN_OK;
    for (int32_t i = 0; i < n && going < (int32_t)w->score_rows; i++)
        if (can_begin(texts[i]))
            who[going++] = texts[i];
    for (int32_t in; going > 0; going = in) {
        bn_timings *timings = &who[0]->session->model->timings;
        const double begin = bn_seconds();
        going = budget ? decide(who, going, timings, budget) : going;
        in = 0;
        if (budget)
            charge(who, going, timings);
        if (going > 0)
            status = guess_once(who, going, w);
        if (going < 1 || status)
            break;
        sample_all(who, going, w);
        for (int32_t i = 0; i < going; i++)
            if (take_guess(who[i], budget))
                who[in++] = who[i];
        if (!budget)
            continue;
        budget->drafting += bn_seconds() - begin;
        bn_note_time(timings->draft_round, going, bn_seconds() - begin);
    }
    return status;
}

bn_status bn_session_guess(bn_session *s, const bn_sampler *sampler, int32_t token, int32_t most,
                           int32_t *guesses, float *confidences, int32_t *n) {
    BN_STANDARD_FLOATS;
    if (!s || !guesses || !confidences || !n || most < 0)
        return BN_ERR_ARGUMENT;
    bn_status status = bn_check_tokens(s, &token, 1);
    const int32_t pending = s->pending;
    const int32_t room = bn_smaller(s->n_ctx - s->position - 1, bn_smaller(s->batch, BN_GUESSES));
    bn_guesses g = {
        .session = s, .sampler = sampler, .token = token, .most = bn_smaller(most, room)};
    if (!status)
        status = bn_check_sampler(sampler, s->stack->config.vocab_size);
    const int none = !s->stack->draft || g.most < 1;
    if (!status && !none)
        status = bn_session_reserve(s, g.most + 1);
    if (status)
        return status;
    if (!none) {
        bn_workspace *w = bn_turn_begin(s->model);
        status = bn_guess(&(bn_guesses *){&g}, 1, w, NULL);
        bn_turn_end(s->model);
    }
    if (pending > 0 && s->drafted == s->position) { /* the next token may differ */
        s->drafted--;
        s->pending = 1;
    }
    if (status)
        return status;
    memcpy(guesses, g.tokens, (size_t)g.n * sizeof *guesses);
    memcpy(confidences, g.confidences, (size_t)g.n * sizeof *confidences);
    *n = g.n;
    return BN_OK;
}
