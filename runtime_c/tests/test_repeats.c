/* SPDX-License-Identifier: MIT
 *
 * test_repeats.c: guesses from repetitions. The place that is followed agrees with at least as many
 * tokens as any other; promised probabilities hold. Guesses are made where that is faster, with and
 * without a draft of the model, and change no token.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "mask_model.h"
#include "session/guess.h"
#include "session/repeats.h"

enum { LONG = 600, PROMPT = 40, NEW = 100, MOST = 8 };

static const int32_t favoured[] = {7};
static const float favours[] = {1000};
static const bn_sampler constant = {.n_bias = 1, .bias_tokens = favoured, .bias_values = favours};

static void draw(int32_t *tokens, int32_t n, size_t kinds, uint64_t seed) {
    for (int32_t i = 0; i < n; i++)
        tokens[i] = check_below(&seed, 40) ? (int32_t)check_below(&seed, kinds) : BN_NO_TOKEN;
}

/* How many of the last tokens also occur `back` tokens earlier, up to the limit. */
static int32_t agreeing(const int32_t *tokens, int32_t n, int32_t back) {
    for (int32_t i = 0;; i++)
        if (i == BN_REPEATS || n - 1 - i - back < 0 || tokens[n - 1 - i] == BN_NO_TOKEN ||
            tokens[n - 1 - i] != tokens[n - 1 - i - back])
            return i;
}

static void check_place(const bn_repeats *r, const int32_t *tokens, int32_t n) {
    int32_t longest = 0;
    for (int32_t back = 1; back < n; back++) {
        const int32_t agree = agreeing(tokens, n, back);
        longest = agree > longest ? agree : longest;
    }
    CHECK_EQ(r->agree, longest);
    CHECK((r->back > 0) == (longest > 0));
    if (r->back > 0)
        CHECK_EQ(agreeing(tokens, n, r->back), longest);
}

/* Texts of few different tokens, processed in pieces of random lengths, and cut. */
static void test_places(void) {
    int32_t tokens[LONG + MOST];
    double probabilities[MOST];
    for (uint64_t seed = 0; seed < 12; seed++) {
        uint64_t random = seed;
        bn_repeats r = {0};
        draw(tokens, LONG, 2 + 3 * seed, seed);
        for (int32_t n = 1; n < LONG; n += 1 + (int32_t)check_below(&random, seed % 2 ? 3 : 200)) {
            bn_repeats_see(&r, tokens, n);
            check_place(&r, tokens, n);
            int32_t behind[MOST];
            memcpy(behind, tokens + n, sizeof behind);
            const int32_t guesses = bn_repeats_guess(&r, tokens, n, MOST, probabilities);
            for (int32_t i = 0; i < guesses; i++) {
                CHECK(tokens[n + i] == tokens[n + i - r.back] && tokens[n + i] != BN_NO_TOKEN);
                CHECK(probabilities[i] > 0 &&
                      probabilities[i] <= (i > 0 ? probabilities[i - 1] : 1));
            }
            memcpy(tokens + n, behind, sizeof behind);
            if (check_below(&random, 10) == 0)
                n -= (int32_t)check_below(&random, n < 20 ? (size_t)n : 20);
        }
    }
}

/* A text in a loop promises a whole piece, noise next to nothing. */
static void test_promises(void) {
    int32_t tokens[LONG + MOST];
    double probabilities[MOST];
    bn_repeats r = {0};
    for (int32_t i = 0; i < LONG; i++)
        tokens[i] = i % 5;
    for (int32_t n = 1; n <= 100; n++)
        bn_repeats_see(&r, tokens, n);
    CHECK_EQ(bn_repeats_guess(&r, tokens, 100, MOST, probabilities), MOST);
    CHECK(r.back == 5 && probabilities[MOST - 1] > 0.7);
    for (int32_t i = 0; i < MOST; i++)
        CHECK_EQ(tokens[100 + i], i % 5);
    draw(tokens, LONG, 5, 3);
    bn_repeats_see(&r, tokens, LONG);
    const int32_t found = bn_repeats_guess(&r, tokens, LONG, MOST, probabilities);
    CHECK(found == 0 || probabilities[0] < 0.5);
    bn_repeats new = {0};
    bn_repeats_see(&new, tokens, LONG); /* the end of a prompt is learned at once */
    double offered = 0;
    for (int32_t i = 0; i < BN_REPEATS; i++)
        offered += new.offered[i];
    CHECK(offered > 50);
}

/* Single steps and steps with repetitions give the same tokens. Returns how many of the latter
 * there were. */
static int32_t count_steps(bn_session *s) {
    bn_session *single;
    int32_t tokens[MOST], one, n, steps = 0;
    ok(bn_session_fork(s, &single));
    for (int32_t done = 0; done < NEW; done += n, steps++) {
        ok(bn_session_step(s, &constant, NULL, 0, tokens, MOST, &n));
        for (int32_t i = 0; i < n; i++) {
            int32_t token;
            ok(bn_session_step(single, &constant, NULL, 0, &token, 1, &one));
            CHECK_EQ(token, tokens[i]);
        }
        model->timings = (bn_timings){0}; /* so that guesses are worth it */
    }
    CHECK(memcmp(bn_session_logits(s), bn_session_logits(single), VOCAB * sizeof(float)) == 0);
    bn_session_free(single);
    return steps;
}

static void test_steps_are_saved(void) {
    bn_session *s = session(TEXT, 128, BN_KV_F16), *without;
    ok(bn_session_append(s, text, PROMPT, BN_LOGITS_LAST, NULL));
    const int32_t steps = count_steps(s);
    CHECK_MSG(steps < NEW / 4, "%d steps", steps);
    ok(bn_session_new(model, &(bn_session_options){.no_draft = 1}, &without));
    ok(bn_session_append(without, text, PROMPT, BN_LOGITS_LAST, NULL));
    CHECK_EQ(count_steps(without), NEW);
    bn_session_free(without);
    bn_session_free(s);
}

/* After repetitions the draft guesses the same as after a text appended at once. */
static void test_the_draft_keeps_up(void) {
    int32_t found[MOST], expected[MOST], n, m;
    float sure[MOST], as_sure[MOST];
    bn_session *s = session(TEXT, 128, BN_KV_F16), *fresh = session(TEXT, 128, BN_KV_F16);
    ok(bn_session_append(s, text, PROMPT, BN_LOGITS_LAST, NULL));
    s->draft_stats =
        (bn_draft_stats){.verified = 30, .accepted = 3}; /* so that repetitions promise more */
    CHECK(count_steps(s) < NEW / 4);
    ok(bn_session_append(fresh, bn_session_tokens(s), bn_session_position(s), BN_LOGITS_LAST,
                         NULL));
    ok(bn_session_guess(s, NULL, 9, MOST, found, sure, &n));
    ok(bn_session_guess(fresh, NULL, 9, MOST, expected, as_sure, &m));
    CHECK(n == MOST && m == MOST);
    CHECK(memcmp(found, expected, sizeof found) == 0 && memcmp(sure, as_sure, sizeof sure) == 0);
    bn_session_free(fresh);
    bn_session_free(s);
}

/* A pass of two rows takes 1.5 times as long as one of one row, with more rows much longer; the
 * draft is right 3 times out of 4 and takes half a pass per guess. */
static void test_what_is_worth_it(void) {
    bn_session *s = session(TEXT, 128, BN_KV_F16);
    const bn_draft_budget alone = {.rows = 1, .most = MOST, .tokens = 1};
    int32_t tokens[PROMPT];
    for (int32_t i = 0; i < PROMPT; i++)
        tokens[i] = i % 5;
    ok(bn_session_append(s, tokens, PROMPT, BN_LOGITS_LAST, NULL));
    for (int slow = 0; slow < 2; slow++) {
        bn_draft_budget pass = alone;
        model->timings = (bn_timings){.pass = {1, slow ? 2 : 1.5, 9}, .draft_round = {0.5}};
        CHECK_EQ(bn_repeats_draft(s, 0, MOST - 1, &pass), !slow);
        CHECK(pass.rows == 2 - slow && pass.tokens > 1.8 - 0.8 * slow - 1e-9 && pass.tokens <= 2);
    }
    int32_t tried = 0;
    for (int32_t i = 0; i < 256; i++) {
        bn_draft_budget pass = alone;
        tried += bn_repeats_draft(s, 0, MOST - 1, &pass) > 1;
    }
    CHECK_EQ(tried, 2);
    /* Repetitions are wrong half of the time: then the draft's guess, although it takes longer, is
     * better, unless it takes a whole pass. */
    bn_draft_budget pass = alone;
    for (int32_t i = 0; i < BN_REPEATS; i++)
        s->repeats.offered[i] = 20, s->repeats.right[i] = 10;
    for (int slow = 0; slow < 2; slow++) {
        model->timings = (bn_timings){.pass = {1, 1.1, 9}, .draft_round = {slow ? 1 : 0.01}};
        const int32_t n = bn_repeats_draft(s, 0, MOST - 1, &pass);
        CHECK_EQ(n, slow || !kind.draft);
        pass = alone;
    }
    bn_session_free(s);
}

int main(void) {
    test_places();
    test_promises();
    for (uint32_t draft = 0; draft < 2; draft++) {
        kind.draft = draft;
        begin(BN_MASK_CAUSAL, 0, 0);
        test_steps_are_saved();
        if (draft)
            test_the_draft_keeps_up();
        test_what_is_worth_it();
        end();
    }
    return 0;
}
