/* SPDX-License-Identifier: MIT
 *
 * test_advance.c: which entries a pass takes, and how many rows it has: no more than there is room
 * for, and no fewer.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "session/advance.h"

#include "mask_model.h"
#include "session/guess.h"

enum { MANY = 64, LONG = 20 }; /* LONG: more guesses than a text with a draft may have */

static int32_t chosen[BN_GUESSERS + 1][MANY];
static bn_timings known; /* before each pass; while there are none, all guesses are worth it */

static bn_entry entry(bn_session *s, int32_t n_tokens, int32_t most, int32_t n_draft) {
    return (bn_entry){.session = s,
                      .tokens = text,
                      .n_tokens = n_tokens,
                      .most = most,
                      .draft = text + 1,
                      .n_draft = n_draft};
}

/* The draft can guess only after a token that was appended, not where a text was cut. */
static void begin_text(bn_session *s, const int32_t *tokens, int32_t n) {
    ok(bn_session_rewind(s, 0));
    if (n > 0)
        ok(bn_session_append(s, tokens, n, BN_LOGITS_LAST, NULL));
}

/* One pass over the entries, with scores for this many rows. Returns how many entries it took;
 * rows: how many rows it had. */
static int32_t pass(bn_entry *entries, int32_t n, size_t score_rows, size_t *rows) {
    bn_batch b = bn_batch_begin(entries->session);
    const size_t was = b.w->score_rows;
    model->timings = known;
    for (int32_t i = 0; i < n; i++)
        entries[i].chosen = chosen[i];
    b.w->score_rows = bn_min(was, score_rows);
    const int32_t taken = bn_advance(&b, entries, n, 0);
    b.w->score_rows = was;
    *rows = b.n;
    bn_batch_end(&b);
    for (int32_t i = 0; i < taken; i++)
        ok(entries[i].status);
    return taken;
}

/* Checks a pass, and leaves the texts as they were. */
static void check_pass(bn_entry *entries, int32_t n, size_t score_rows, int32_t taken,
                       size_t rows) {
    int32_t held[BN_GUESSERS + 1];
    size_t found;
    for (int32_t i = 0; i < n; i++)
        held[i] = bn_session_position(entries[i].session);
    CHECK_EQ(pass(entries, n, score_rows, &found), taken);
    CHECK_EQ(found, rows);
    for (int32_t i = 0; i < n; i++)
        begin_text(entries[i].session, entries[i].tokens, held[i]);
}

static void test_full(void) {
    enum { BATCH = 40 };
    bn_session *s[BN_GUESSERS + 1];
    bn_entry entries[BN_GUESSERS + 1];
    for (int32_t i = 0; i <= BN_GUESSERS; i++) {
        s[i] = session(TEXT, BATCH, BN_KV_F16);
        entries[i] = entry(s[i], 1, 1, 0);
    }
    check_pass(entries, BN_GUESSERS, MANY, BN_GUESSERS, BN_GUESSERS);
    check_pass(entries, BN_GUESSERS + 1, MANY, BN_GUESSERS, BN_GUESSERS);
    check_pass(entries, 5, 4, 4, 4);
    check_pass(entries, 4, 4, 4, 4);
    entries[0] = entry(s[0], BATCH - 1, 0, 0);
    check_pass(entries, 2, MANY, 2, BATCH);
    entries[0] = entry(s[0], BATCH, 0, 0);
    check_pass(entries, 2, MANY, 1, BATCH);
    for (int32_t i = 0; i <= BN_GUESSERS; i++)
        bn_session_free(s[i]);
}

/* Guesses of the caller fill what room the known tokens leave. */
static void test_room_for_guesses(void) {
    bn_session *s[3], *few = session(TEXT, 8, BN_KV_F16), *full = session(19, 32, BN_KV_F16);
    bn_entry entries[3], e = entry(few, 1, MANY, LONG);
    for (int i = 0; i < 3; i++) {
        s[i] = session(TEXT, 32, BN_KV_F16);
        entries[i] = entry(s[i], 1, MANY, LONG);
    }
    check_pass(entries, 1, MANY, 1, kind.draft ? BN_GUESSES : 1 + LONG);
    check_pass(entries, 3, MANY, 3, 32);
    check_pass(entries, 3, 5, 3, 5);
    entries[0] = entry(s[0], 29, 0, 0);
    check_pass(entries, 2, MANY, 2, 32);
    CHECK(model->timings.pass[32 - 1] == 0); /* no measure of a pass in which all rows choose */
    check_pass(&e, 1, MANY, 1, 8);           /* as many rows as its session may have */
    e.most = 3;
    check_pass(&e, 1, MANY, 1, 3);
    begin_text(full, text, 16);
    e = entry(full, 1, MANY, LONG);
    check_pass(&e, 1, MANY, 1, 3); /* to the end of its context */
    for (int i = 0; i < 3; i++)
        bn_session_free(s[i]);
    bn_session_free(few);
    bn_session_free(full);
}

/* The draft guesses for short texts, too, but not in a pass that is full or longer than those that
 * are timed, and not for a session that shall not guess, even if its text repeats itself. */
static void test_own_guesses(void) {
    const bn_session_options without = {.n_ctx = TEXT, .no_draft = 1};
    int32_t again[MANY];
    bn_session *s[3];
    bn_entry entries[3];
    for (int32_t i = 0; i < MANY; i++)
        again[i] = i % 4;
    for (int i = 0; i < 3; i++) {
        s[i] = session(TEXT, MANY, BN_KV_F16);
        begin_text(s[i], text, 5);
        entries[i] = entry(s[i], 1, 2, LONG);
    }
    entries[0] = entry(s[0], 1, MANY, 0);
    check_pass(entries, 1, MANY, 1, BN_GUESSES);
    check_pass(entries, 2, MANY, 2, BN_GUESSES + 2);
    entries[1].most = entries[2].most = MANY;
    check_pass(entries, 3, MANY, 3, 1 + 2 * BN_GUESSES);
    check_pass(entries, 1, 3, 1, 3);
    bn_session_free(s[1]);
    ok(bn_session_new(model, &without, &s[1]));
    entries[1] = entry(s[1], 1, MANY, 0);
    for (int i = 0; i < 2; i++)
        begin_text(s[i], again, MANY);
    entries[0].tokens = entries[1].tokens = again;
    check_pass(entries, 1, MANY, 1, BN_GUESSES);
    check_pass(entries + 1, 1, MANY, 1, 1);
    for (int i = 0; i < 3; i++)
        bn_session_free(s[i]);
}

/* What was guessed right, and the first wrong guess, are recorded. */
static void test_outcomes(void) {
    enum { MOST = 5 };
    for (int likely = 0; likely < 2; likely++) {
        const bn_sampler sampler = {.temperature = likely ? 5000 : 0};
        bn_session *s = session(TEXT, MANY, BN_KV_F16);
        bn_draft_stats expected = {0};
        bn_entry e = entry(s, 1, MOST, 0);
        size_t rows;
        begin_text(s, text, 5);
        e.sampler = &sampler;
        CHECK_EQ(pass(&e, 1, MANY, &rows), 1);
        CHECK(rows == MOST && (e.n_chosen > 1) == likely);
        for (int32_t i = 0; i < e.n_chosen && i < MOST - 1; i++)
            bn_draft_note(&expected, 1, i + 1 < e.n_chosen);
        CHECK(s->draft_stats.verified == expected.verified);
        CHECK(s->draft_stats.accepted == expected.accepted);
        bn_session_free(s);
    }
}

/* A draft that has cost a text too much does not keep up with it any more. */
static void test_given_up(void) {
    bn_session *s = session(TEXT, MANY, BN_KV_F16);
    bn_entry e = entry(s, 1, 4, 0);
    size_t rows;
    begin_text(s, text, 5);
    known.pass[0] = 1;
    s->draft_stats.spent = 1000;
    CHECK(bn_can_guess(s) && pass(&e, 1, MANY, &rows) == 1 && !bn_can_guess(s));
    ok(bn_session_append(s, text, 5, BN_LOGITS_LAST, NULL));
    CHECK(!bn_can_guess(s));
    known.pass[0] = 0;
    bn_session_free(s);
}

int main(void) {
    for (kind.draft = 0; kind.draft < 2; kind.draft++) {
        const uint32_t draft = kind.draft;
        begin(BN_MASK_CAUSAL, 0, 0);
        test_full();
        test_room_for_guesses();
        if (draft) {
            test_own_guesses();
            test_outcomes();
            test_given_up();
        }
        end();
        kind.draft = draft;
    }
    return 0;
}
