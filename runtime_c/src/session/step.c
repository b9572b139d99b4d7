/* SPDX-License-Identifier: MIT
 *
 * step.c: generates tokens of one or several texts; each pass gives one token per text, plus the
 * guesses that were right.
 */
#include "advance.h"
#include "choose.h"
#include "sampler.h"
#include "system/clock.h"

enum { TOGETHER = 64 }; /* texts that go on unasked */

static bn_status check_draft(const bn_session *s, const int32_t *draft, int32_t n) {
    bn_status status = BN_OK;
    for (int32_t i = 0; i < n && !status; i++)
        status = bn_check_tokens(s, &draft[i], 1);
    return status;
}

/* Before any work: check the arguments, and reserve memory for the known tokens. */
static bn_status check(const bn_entry *entry) {
    bn_session *s = entry->session;
    bn_status status = bn_check_follows(s);
    if (!status)
        status = bn_check_tokens(s, entry->tokens, entry->n_tokens);
    if (!status && entry->most > 0 && !s->stack->config.has_head)
        status = BN_ERR_NO_HEAD;
    if (!status)
        status = check_draft(s, entry->draft, entry->n_draft);
    if (!status && entry->most > 0)
        status = bn_check_sampler(entry->sampler, s->stack->config.vocab_size);
    return status ? status : bn_session_reserve(s, entry->n_tokens);
}

bn_status bn_session_step(bn_session *s, const bn_sampler *sampler, const int32_t *draft,
                          int32_t n_draft, int32_t *tokens, int32_t most, int32_t *n) {
    BN_STANDARD_FLOATS;
    if (!s || !tokens || !n || most < 1 || n_draft < 0 || (n_draft > 0 && !draft))
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    if (bn_check_follows(s))
        return BN_ERR_MASK;
    if (s->position == s->n_ctx)
        return BN_ERR_CONTEXT;
    if (s->ready == BN_READY_NOTHING)
        return BN_ERR_STATE;
    bn_status status = check_draft(s, draft, n_draft);
    if (status)
        return status;
    int32_t token;
    const bn_sampler behind = bn_nth_sampler(sampler, 1, s->stack->config.vocab_size);
    bn_entry entry = {.session = s,
                      .tokens = &token,
                      .n_tokens = 1,
                      .most = most,
                      .sampler = &behind,
                      .chosen = tokens + 1};
    bn_batch b = bn_batch_begin(s);
    const bn_prediction of = bn_prediction_of(s);
    status = bn_choose(&of, b.w, sampler, &token, NULL);
    if (n_draft > 0) { /* the engine makes no guesses of its own */
        entry.draft = draft + 1;
        entry.n_draft = !status && draft[0] == token ? bn_smaller(n_draft, most) - 1 : 0;
        entry.most = 1 + entry.n_draft;
    }
    if (!status)
        status = check(&entry);
    if (!status) {
        bn_advance(&b, &entry, 1, 1);
        status = entry.status;
    }
    bn_batch_end(&b);
    if (status)
        return status;
    tokens[0] = token;
    *n = 1 + entry.n_chosen;
    return BN_OK;
}

/* Run the part of a long piece that precedes the pass. */
static bn_status begin_piece(const bn_entry *entry) {
    const bn_text text = {.tokens = entry->tokens, .n = entry->n_tokens - bn_count_tokens(entry)};
    return text.n > 0
               ? bn_run_text(entry->session, &text, BN_WANT_NOTHING, BN_WANT_NOTHING, NULL, 0)
               : BN_OK;
}

/* A pass over the n entries that are in order, in as many turns as it takes. */
static void run(bn_entry *entries, int32_t n) {
    for (int32_t done = 0; done < n;) {
        bn_batch b = bn_batch_begin(entries->session);
        done += bn_advance(&b, entries + done, n - done, 0);
        bn_batch_end(&b);
    }
}

/* The entry after `entry` that goes on with it: appends the token chosen last, and chooses more. */
static bn_entry following(const bn_entry *entry) {
    bn_entry next = *entry;
    next.tokens = &entry->chosen[entry->n_chosen - 1];
    next.n_tokens = 1;
    next.most -= entry->n_chosen;
    next.chosen += entry->n_chosen;
    next.n_chosen = 0;
    return next;
}

/* Whether it can go on unasked: of what the caller gave for one pass nothing is needed. */
static int goes_on(const bn_entry *entry) {
    return !entry->status && entry->n_chosen < entry->most && entry->n_draft < 1 &&
           !(entry->sampler &&
             entry->sampler->allowed); /* for which one row of `allowed` suffices */
}

/* One more pass for all. 0: not all can have it, or one failed, which is undone: the next call
 * reports why. */
static int once_more(bn_entry *entries, int32_t n) {
    bn_entry next[TOGETHER];
    int32_t held[TOGETHER], whole = 1;
    for (int32_t i = 0; i < n; i++) {
        if (!goes_on(&entries[i]))
            return 0;
        next[i] = following(&entries[i]);
        held[i] = next[i].session->position;
        if ((next[i].status = check(&next[i])))
            return 0;
    }
    run(next, n);
    for (int32_t i = 0; i < n; i++) {
        if (next[i].status) {
            bn_session_cut(next[i].session, held[i]);
            whole = 0;
        } else {
            entries[i].n_chosen += next[i].n_chosen;
            entries[i].n_passes++;
        }
    }
    return whole;
}

/* More passes: if one takes microseconds, a call for each would take as long. */
static void go_on(bn_entry *entries, int32_t n, double begin) {
    float moment = entries->moment;
    for (int32_t i = 1; i < n; i++)
        moment = entries[i].moment < moment ? entries[i].moment : moment;
    if (n > TOGETHER)
        return;
    while (bn_seconds() - begin < (double)moment && once_more(entries, n))
        ;
}

/* Whether the arguments are valid; those of the samplers are checked text by text. */
static int are_valid(const bn_entry *entries, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        const bn_entry *p = &entries[i];
        if (!p->session || p->session->stack != entries->session->stack || !p->tokens ||
            p->n_tokens < 1 || p->most < 0 || !(p->moment >= 0) || p->n_draft < 0 ||
            (p->most > 0 && !p->chosen) || (p->n_draft > 0 && !p->draft))
            return 0;
        for (int32_t j = 0; j < i; j++)
            if (entries[j].session == p->session)
                return 0;
    }
    return 1;
}

/* A program may look at the entries alone, so none of them may seem to have succeeded. */
static bn_status refuse(bn_entry *entries, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        entries[i].n_chosen = entries[i].n_passes = 0;
        entries[i].status = BN_ERR_ARGUMENT;
    }
    return BN_ERR_ARGUMENT;
}

bn_status bn_step_batch(bn_entry *entries, int32_t n) {
    BN_STANDARD_FLOATS;
    if (!entries || n < 1)
        return BN_ERR_ARGUMENT;
    const double begin = entries->moment > 0 ? bn_seconds() : 0;
    if (!are_valid(entries, n))
        return refuse(entries, n);
    for (int32_t i = 0; i < n; i++) {
        entries[i].n_chosen = 0;
        entries[i].status = check(&entries[i]);
        entries[i].n_passes = !entries[i].status;
        if (!entries[i].status)
            entries[i].status = begin_piece(&entries[i]);
    }
    run(entries, n);
    for (int32_t i = 0; i < n; i++)
        if (entries[i].status)
            return entries[i].status;
    go_on(entries, n, begin);
    return BN_OK;
}
