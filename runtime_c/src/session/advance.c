/* SPDX-License-Identifier: MIT
 *
 * advance.c: see advance.h.
 */
#include "advance.h"

#include <string.h>

#include "backlog.h"
#include "choose.h"
#include "guess.h"
#include "repeats.h"
#include "sampler.h"
#include "system/clock.h"

/* The part of one text in a pass. */
typedef struct item {
    bn_entry *entry;
    bn_guesses own;
    const int32_t *guesses; /* the caller's, or its own */
    int32_t n;
    size_t row; /* first row in the batch */
} item;

/* One iteration of continuous batching: pieces of prompts, and tokens with guesses of what follows,
 * which are the draft tokens of speculative decoding. */
typedef struct pass {
    bn_batch *b;
    item items[BN_GUESSERS];
    int32_t n;
    size_t rows;       /* of known tokens */
    size_t scored;     /* of these, those after which a token is chosen at once */
    int step;          /* 1: for bn_session_step, keep only right guesses */
    int32_t base_rows; /* rows of texts that choose a token, including the callers' guesses */
    bn_draft_budget budget;
} pass;

/* Whether its rows produce scores. Otherwise it is a piece of a prompt, whose logits, if needed,
 * are computed later from its last row. */
static int is_scored(const bn_entry *entry) {
    return entry->n_tokens == 1 && entry->most > 0;
}

bn_sampler bn_nth_sampler(const bn_sampler *sampler, size_t i, uint32_t vocab) {
    bn_sampler s = bn_sampler_or_neutral(sampler);
    if (s.allowed)
        s.allowed += i * ((vocab + 31) / 32);
    return s;
}

int32_t bn_count_tokens(const bn_entry *entry) {
    return bn_smaller(entry->n_tokens, entry->session->batch);
}

static const int32_t *tokens_of(const bn_entry *entry) {
    return entry->tokens + (entry->n_tokens - bn_count_tokens(entry));
}

/* --- building the pass --- */

/* Items with the same adapter are adjacent, so that it is read once for all of them. */
static void add_item(pass *p, bn_entry *entry) {
    int32_t at = p->n++;
    for (; at > 0 && p->items[at - 1].entry->session->adapter > entry->session->adapter; at--)
        p->items[at] = p->items[at - 1];
    p->items[at] = (item){.entry = entry};
}

/* Admit entries in order while the pass has room. Returns how many were looked at. */
static int32_t admit(pass *p, bn_entry *entries, int32_t n) {
    int32_t taken = 0;
    for (; taken < n && p->n < BN_GUESSERS; taken++) {
        bn_entry *entry = &entries[taken];
        const size_t rows = (size_t)bn_count_tokens(entry), scored = is_scored(entry) ? 1 : 0;
        if (entry->status)
            continue;
        if (p->rows + rows > p->b->w->batch || p->scored + scored > p->b->w->score_rows)
            break;
        p->rows += rows;
        p->scored += scored;
        add_item(p, entry);
    }
    return taken;
}

/* Room for rows of guesses. */
static int32_t room_of(const pass *p) {
    const size_t rows = p->b->w->batch - p->rows, scores = p->b->w->score_rows - p->scored;
    return (int32_t)bn_min(rows, scores);
}

/* Guesses that a text wants and can use, within `room`: their states and that of the token before
 * them must fit the backlog, if it has one. */
static int32_t most_guesses(const bn_entry *entry, int32_t room) {
    const bn_session *s = entry->session;
    int32_t most = bn_smaller(room, entry->most - 1);
    most = bn_smaller(most, s->n_ctx - s->position - 1);
    most = bn_smaller(most, s->batch - 1);
    return s->stack->draft ? bn_smaller(most, BN_BACKLOG - 1) : most;
}

static void take_callers(item *i, int32_t *room) {
    bn_entry *entry = i->entry;
    const int32_t most = bn_smaller(most_guesses(entry, *room), entry->n_draft);
    if (most < 1 || bn_session_reserve(entry->session, 1 + most)) /* one token may still fit */
        return;
    i->guesses = entry->draft;
    i->n = most;
    *room -= most;
}

/* Whether the engine may guess; not with bn_sampler.allowed. */
static int may_guess(const item *i) {
    const bn_entry *entry = i->entry;
    return is_scored(entry) && entry->n_draft < 1 && entry->session->drafted >= 0 &&
           !(entry->sampler && entry->sampler->allowed);
}

/* Guess where the text repeats itself. Returns whether it should be guessed by the draft instead,
 * together with other texts. */
static int take_own(item *i, bn_draft_budget *budget) {
    bn_entry *entry = i->entry;
    bn_session *s = entry->session;
    const int32_t most = bn_smaller(most_guesses(entry, budget->most - budget->rows), BN_GUESSES);
    if (most < 1 || bn_session_reserve(s, 1 + most))
        return 0;
    if (bn_draft_given_up(&s->draft_stats, &s->model->timings))
        s->pending = 0; /* stop keeping up, which takes time too */
    i->n = bn_repeats_draft(s, *entry->tokens, most, budget);
    i->guesses = s->tokens + s->position + 1;
    i->own = (bn_guesses){
        .session = s, .sampler = entry->sampler, .token = *entry->tokens, .most = most};
    return i->n == 0 && s->stack->draft;
}

/* Take the callers' guesses first, then make the engine's own. */
static void guess(pass *p) {
    bn_guesses *texts[BN_GUESSERS];
    item *of[BN_GUESSERS];
    int32_t n = 0, room = room_of(p);
    for (item *i = p->items; i < p->items + p->n; i++)
        if (is_scored(i->entry))
            take_callers(i, &room);
    p->base_rows = (int32_t)p->scored + room_of(p) - room;
    p->budget = (bn_draft_budget){.rows = p->base_rows,
                                  .most = bn_smaller(p->base_rows + room, BN_TIMED_ROWS),
                                  .tokens = (double)p->scored};
    for (item *i = p->items; i < p->items + p->n; i++)
        if (may_guess(i) && take_own(i, &p->budget)) {
            of[n] = i;
            texts[n++] = &i->own;
        }
    if (n > 0)
        (void)bn_guess(texts, n, p->b->w, &p->budget);
    for (int32_t j = 0; j < n; j++) {
        of[j]->guesses = of[j]->own.tokens;
        of[j]->n = of[j]->own.n;
    }
}

/* Rows that produce scores come first (row.h). */
static void add_rows(pass *p) {
    for (item *i = p->items; i < p->items + p->n; i++)
        bn_backlog_begin(i->entry->session, p->b->w, bn_count_tokens(i->entry) + i->n,
                         *tokens_of(i->entry));
    for (int scored = 1; scored >= 0; scored--)
        for (item *i = p->items; i < p->items + p->n; i++) {
            const bn_entry *entry = i->entry;
            if (is_scored(entry) != scored)
                continue;
            i->row = p->b->n;
            entry->session->ready = BN_READY_NOTHING;
            const int32_t n = bn_count_tokens(entry);
            const bn_want last = scored            ? BN_WANT_SCORES
                                 : entry->most > 0 ? BN_WANT_HIDDEN
                                                   : BN_WANT_NOTHING;
            for (int32_t t = 0; t < n; t++)
                bn_batch_add(p->b, entry->session, tokens_of(entry)[t],
                             t + 1 < n ? BN_WANT_NOTHING : last);
            for (int32_t g = 0; g < i->n; g++)
                bn_batch_add(p->b, entry->session, i->guesses[g], BN_WANT_SCORES);
        }
}

/* --- results of the pass --- */

/* The prediction after a row with scores, which are in the workspace. ready: receives what they
 * are. */
static bn_prediction after_row(const pass *p, const item *i, size_t at, int32_t *ready) {
    bn_prediction of = bn_prediction_of(i->entry->session);
    of.logits = bn_batch_scores(p->b, i->row + at, ready);
    of.ready = ready;
    return of;
}

static void keep_scores(bn_session *s, const bn_prediction *of) {
    memcpy(s->logits, of->logits, s->stack->config.vocab_size * sizeof *s->logits);
    s->ready = *of->ready;
}

static bn_status choose(const item *i, const bn_prediction *of, bn_workspace *w, size_t at,
                        int32_t *token) {
    const bn_sampler sampler = bn_nth_sampler(i->entry->sampler, at, of->stack->config.vocab_size);
    return bn_choose(of, w, &sampler, token, NULL);
}

/* Keep the rows of a text up to the first guess that differs from the chosen token, or after which
 * none can be chosen: the next call reports that, as it would without the guess. w: scratch, which
 * may overlap the first of its rows. */
static void verify(const pass *p, const item *i, bn_workspace *w) {
    bn_entry *entry = i->entry;
    bn_session *s = entry->session;
    const int32_t start = s->position - 1 - i->n;
    for (int32_t at = 0; at <= i->n; at++) {
        s->position = start + at + 1;
        bn_batch_take(p->b, i->row + (size_t)at);
        int32_t token, ready;
        const bn_prediction of = after_row(p, i, (size_t)at, &ready);
        if (p->step) /* the next step may continue from here, and to choose uses estimates up */
            keep_scores(s, &of);
        if (p->step && at == i->n)
            return;
        entry->status = choose(i, &of, w, (size_t)at, &token);
        if (ready == BN_READY_LOGITS && s->ready != BN_READY_LOGITS)
            keep_scores(s, &of);
        const int right = !entry->status && at < i->n && token == i->guesses[at];
        if (p->step && !right) {
            entry->status = BN_OK;
            return;
        }
        if (entry->status && at > 0) {
            entry->status = bn_session_cut(s, start + at);
            return;
        }
        if (!entry->status)
            entry->chosen[entry->n_chosen++] = token;
        if (!right)
            return;
    }
}

/* Finish a piece of a prompt, which has no guesses. */
static void end_piece(pass *p, item *i) {
    bn_entry *entry = i->entry;
    const bn_prediction of = bn_prediction_of(entry->session);
    bn_backlog_end(entry->session, p->b->w, i->row, bn_count_tokens(entry));
    if (entry->most > 0)
        entry->status = choose(i, &of, p->b->w, 0, entry->chosen);
    entry->n_chosen = entry->most > 0 && !entry->status;
}

/* Verify, and record the outcome of the draft's guesses. */
static void verify_and_learn(const pass *p, const item *i, bn_workspace *w) {
    bn_session *s = i->entry->session;
    const int32_t before = s->position - i->n;
    verify(p, i, w);
    const int32_t accepted = s->position - before;
    bn_draft_settle(&s->draft_stats, &s->model->timings, p->base_rows, p->budget.rows, i->own.n,
                    accepted);
    for (int32_t g = 0; g < i->own.n && g <= accepted; g++)
        bn_draft_note(&s->draft_stats, (double)i->own.confidences[g], g < accepted);
}

/* Verify texts with scores, each on one thread: with a large vocabulary, choosing takes as long as
 * several layers. */
static void verify_some(void *context, int32_t thread, size_t first, size_t end) {
    const pass *p = context;
    for (const item *i = p->items + first; i < p->items + end; i++) {
        bn_workspace w = bn_workspace_alone(p->b->w, i->row, (size_t)thread);
        if (is_scored(i->entry))
            verify_and_learn(p, i, &w);
    }
}

static void verify_all(pass *p) {
    if (p->n > 1)
        bn_pool_run(p->b->m->pool, (size_t)p->n, 1, verify_some, p);
    else if (is_scored(p->items->entry))
        verify_and_learn(p, p->items, p->b->w);
}

/* One of the texts cannot be computed: rerun each alone. If there is only one, retry without its
 * guesses. */
static void fail(pass *p, bn_status status) {
    bn_entry *first = p->items->entry;
    const int32_t most = first->most;
    if (p->n > 1) {
        for (int32_t i = 0; i < p->n; i++)
            bn_advance(p->b, p->items[i].entry, 1, p->step);
    } else if (p->items->n > 0) {
        first->most = 1;
        bn_advance(p->b, first, 1, p->step);
        first->most = most;
    } else {
        first->status = status;
    }
}

int32_t bn_advance(bn_batch *b, bn_entry *entries, int32_t n, int step) {
    pass p = {.b = b, .step = step};
    const double begin = bn_seconds();
    b->n = 0;
    const int32_t taken = admit(&p, entries, n);
    if (p.n == 0)
        return taken;
    guess(&p);
    add_rows(&p);
    const bn_status status = bn_batch_run(b);
    if (status) {
        fail(&p, status);
        return taken;
    }
    verify_all(&p);
    for (item *i = p.items; i < p.items + p.n; i++)
        if (!is_scored(i->entry))
            end_piece(&p, i);
    if (p.scored == p.rows)
        bn_note_time(entries->session->model->timings.pass, (int32_t)b->n,
                     bn_seconds() - begin - p.budget.drafting);
    return taken;
}
