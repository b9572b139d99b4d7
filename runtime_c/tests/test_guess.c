/* SPDX-License-Identifier: MIT
 *
 * test_guess.c: the model's draft. Its guesses depend only on the text, not on how it was appended,
 * nor on the machine; tokens never depend on the guesses.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include <math.h>

#include "draft.h"
#include "mask_model.h"
#include "together.h"

enum { PROMPT = 300, MOST = 6 };

/* From no right guesses to nearly all: the higher the temperature, the more the noise decides,
 * which text and draft share. */
static const bn_sampler samplers[] = {
    {0},
    {.temperature = 1, .top_k = 20},
    {.temperature = 5000, .top_p = 0.99f},
    {.temperature = 40, .repeat_penalty = 1.5f, .penalty_window = -1}};

typedef struct guesses {
    int32_t tokens[MOST], n;
    float confidences[MOST];
} guesses;

static guesses guess(bn_session *s, const bn_sampler *sampler) {
    guesses g = {.n = -1};
    ok(bn_session_guess(s, sampler, 7, MOST, g.tokens, g.confidences, &g.n));
    return g;
}

static void check_same(const guesses *a, const guesses *b) {
    CHECK_EQ(a->n, b->n);
    CHECK(memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0);
    CHECK(memcmp(a->confidences, b->confidences, sizeof a->confidences) == 0);
}

static void append(bn_session *s, int32_t first, int32_t n) {
    ok(bn_session_append(s, text + first, n, BN_LOGITS_LAST, NULL));
}

static bn_session *saved_and_loaded(bn_session *s) {
    const uint64_t size = bn_session_saved_size(s, 0);
    uint8_t *bytes = malloc(size);
    bn_session *back;
    CHECK(bytes != NULL);
    ok(bn_session_save(s, NULL, 0, bytes, size));
    ok(bn_session_load(model, bytes, size, &back, NULL, NULL, NULL));
    free(bytes);
    bn_session_free(s);
    return back;
}

/* Append the prompt in pieces of random lengths, with other session calls in between. */
static bn_session *in_pieces(int32_t type, uint64_t random, size_t longest) {
    bn_session *s = session(TEXT, 1 + (int32_t)check_below(&random, 90), type), *other;
    for (int32_t at = 0, n; at < PROMPT; at += n) {
        n = 1 + (int32_t)check_below(&random, longest);
        n = n < PROMPT - at ? n : PROMPT - at;
        switch (check_below(&random, 6)) {
        case 0:
            s = saved_and_loaded(s);
            break;
        case 1: /* and the first session diverges */
            ok(bn_session_fork(s, &other));
            append(s, 5, 40);
            bn_session_free(s);
            s = other;
            break;
        case 2: /* a batch of one */
            n = 1;
            ok(append_together(&s, text + at, 1));
            continue;
        case 3:
            guess(s, &samplers[1]);
        }
        append(s, at, n);
    }
    return s;
}

static void test_same_guesses(void) {
    enum { SAMPLERS = sizeof samplers / sizeof *samplers };
    for (int32_t type = 0; type < BN_KV_TYPES; type++) {
        guesses expected[SAMPLERS];
        bn_session *s = session(TEXT, 128, type);
        append(s, 0, PROMPT);
        for (size_t i = 0; i < SAMPLERS; i++) {
            expected[i] = guess(s, &samplers[i]);
            CHECK_EQ(expected[i].n, MOST);
            for (int j = 0; j < MOST; j++)
                CHECK(expected[i].confidences[j] >= 0 && expected[i].confidences[j] <= 1);
        }
        bn_session_free(s);
        for (uint64_t seed = 0; seed < 4; seed++) {
            s = in_pieces(type, seed, seed % 2 ? 3 : 200);
            for (size_t i = 0; i < SAMPLERS; i++) {
                const guesses found = guess(s, &samplers[i]);
                check_same(&expected[i], &found);
            }
            bn_session_free(s);
        }
    }
}

static void test_same_on_every_machine(void) {
    bn_model *first = model;
    bn_session *s = session(TEXT, 128, BN_KV_F16);
    append(s, 0, PROMPT);
    const guesses expected = guess(s, &samplers[1]);
    bn_session_free(s);
    for (int32_t tier = 0; bn_isa_name(tier); tier++) {
        open_model(bn_isa_name(tier), 1 + tier % 3);
        s = session(TEXT, 128, BN_KV_F16);
        append(s, 0, PROMPT);
        const guesses found = guess(s, &samplers[1]);
        check_same(&expected, &found);
        bn_session_free(s);
        bn_model_close(model);
    }
    model = first;
}

/* The same prompt in pieces, in passes with texts that choose a token. */
static void test_same_guesses_beside_others(void) {
    enum { OTHERS = 3, PIECE = 140 };
    bn_session *s = session(TEXT, PIECE + OTHERS, BN_KV_F16), *others[OTHERS];
    append(s, 0, PROMPT);
    const guesses expected = guess(s, &samplers[1]);
    ok(bn_session_rewind(s, 0));
    for (int32_t i = 0; i < OTHERS; i++)
        others[i] = session(TEXT, PIECE + OTHERS, BN_KV_F16);
    for (int32_t at = 0, n; at < PROMPT; at += n) {
        int32_t chosen[OTHERS];
        bn_entry entries[OTHERS + 1];
        n = PIECE < PROMPT - at ? PIECE : PROMPT - at;
        entries[OTHERS] = (bn_entry){.session = s, .tokens = text + at, .n_tokens = n};
        for (int32_t i = 0; i < OTHERS; i++)
            entries[i] = (bn_entry){.session = others[i],
                                    .tokens = text + i,
                                    .n_tokens = 1,
                                    .most = 1,
                                    .chosen = &chosen[i]};
        ok(bn_step_batch(entries, OTHERS + 1));
    }
    const guesses found = guess(s, &samplers[1]);
    check_same(&expected, &found);
    for (int32_t i = 0; i < OTHERS; i++)
        bn_session_free(others[i]);
    bn_session_free(s);
}

/* A token whose state is not finite: guessing it does no harm. */
static void test_a_guess_that_is_no_number(void) {
    enum { OF = 2 };
    bn_session *s[OF], *alone = session(TEXT, 128, BN_KV_F16);
    bn_entry entries[OF];
    int32_t tokens[2], chosen[OF][4], n;
    append(alone, 0, 20);
    ok(bn_session_step(alone, NULL, NULL, 0, tokens, 1, &n));
    ok(bn_session_sample(alone, NULL, tokens + 1));
    const int32_t bad = (tokens[1] + 1) % VOCAB, draft[] = {tokens[0], bad, bad};
    float *scale = (float *)(uintptr_t)&model->stack.embedding.scales[bad], was = *scale;
    for (int i = 0; i < OF; i++) {
        s[i] = session(TEXT, 128, BN_KV_F16);
        append(s[i], 0, 20);
        entries[i] = (bn_entry){.session = s[i],
                                .tokens = tokens,
                                .n_tokens = 1,
                                .most = 3,
                                .draft = draft + 1,
                                .n_draft = 2 * !i,
                                .chosen = chosen[i]};
    }
    *scale = NAN;
    CHECK_EQ(bn_session_append(alone, &bad, 1, BN_LOGITS_LAST, NULL), BN_ERR_NUMERIC);
    ok(bn_session_step(s[0], NULL, draft, 3, chosen[0], 3, &n));
    CHECK(n == 1 && chosen[0][0] == tokens[0] && bn_session_position(s[0]) == 21);
    ok(bn_session_rewind(s[0], 19));
    append(s[0], 19, 1);
    ok(bn_step_batch(entries, OF));
    for (int i = 0; i < OF; i++) {
        CHECK(entries[i].n_chosen >= 1 && chosen[i][0] == tokens[1] && entries[i].most == 3);
        CHECK_EQ(bn_session_position(s[i]), 20 + entries[i].n_chosen);
        bn_session_free(s[i]);
    }
    *scale = was;
    bn_session_free(alone);
}

/* A draft that computes a value that is not finite, in its first round or a later one. The session
 * is as before. */
static void test_failing_draft(void) {
    bn_session *s = session(TEXT, 128, BN_KV_F16);
    append(s, 0, 20);
    int32_t before[8], after[8], n, m;
    float sure[8];
    ok(bn_session_guess(s, NULL, 7, 8, before, sure, &n));
    CHECK(n > 1 && before[0] != 7);
    for (int round = 0; round < 2; round++) {
        const int32_t bad = round ? before[0] : 7;
        float *scale = (float *)(uintptr_t)&model->stack.embedding.scales[bad], was = *scale;
        *scale = NAN;
        m = 77;
        CHECK_EQ(bn_session_guess(s, NULL, 7, 8, after, sure, &m), BN_ERR_NUMERIC);
        CHECK_EQ(m, 77);
        *scale = was;
        CHECK_EQ(bn_session_position(s), 20);
        ok(bn_session_guess(s, NULL, 7, 8, after, sure, &m));
        CHECK(m == n && memcmp(before, after, (size_t)n * sizeof *before) == 0);
    }
    bn_session_free(s);
}

/* Steps of several tokens give the tokens of single steps. Returns how many steps there were. */
static int32_t count_steps(bn_session *s, const bn_sampler *sampler, const int32_t *expected,
                           int32_t n, int32_t most) {
    int32_t tokens[32], steps = 0;
    for (int32_t done = 0, made; done < n; done += made, steps++) {
        model->timings = (bn_timings){0}; /* so that guesses are worth it */
        ok(bn_session_step(s, sampler, NULL, 0, tokens, most < n - done ? most : n - done, &made));
        CHECK(made >= 1 && made <= most && made <= n - done);
        CHECK(memcmp(tokens, expected + done, (size_t)made * sizeof *tokens) == 0);
        CHECK_EQ(bn_session_position(s), PROMPT + done + made);
    }
    return steps;
}

static void test_tokens_are_the_same(void) {
    enum { NEW = 90 };
    int32_t expected[NEW], n, steps[4];
    for (size_t i = 0; i < 4; i++) {
        bn_session *s = session(TEXT, 128, BN_KV_F16), *all;
        append(s, 0, PROMPT);
        bn_session_seed(s, i);
        ok(bn_session_fork(s, &all));
        for (int32_t at = 0; at < NEW; at++)
            ok(bn_session_step(all, &samplers[i], NULL, 0, expected + at, 1, &n));
        steps[i] = count_steps(s, &samplers[i], expected, NEW, 8);
        CHECK(memcmp(bn_session_logits(s), bn_session_logits(all), VOCAB * sizeof(float)) == 0);
        bn_session_free(s);
        bn_session_free(all);
    }
    CHECK_MSG(steps[2] < NEW / 2, "%d steps", steps[2]);
}

/* Tokens after the end, which a longer text left there, and memory that the text has not reached
 * yet do not matter. */
static void test_past_the_end(void) {
    bn_session *s = session(TEXT, 128, BN_KV_F16), *longer = session(TEXT, 128, BN_KV_F16);
    append(s, 0, BN_BLOCK_KEYS - 8);
    append(longer, 0, PROMPT);
    for (int32_t at = BN_BLOCK_KEYS - 8; at < BN_BLOCK_KEYS + 2; at++) {
        ok(bn_session_rewind(longer, at));
        append(longer, at, 1);
        append(s, at, 1);
        const guesses expected = guess(s, &samplers[1]), found = guess(longer, &samplers[1]);
        CHECK_EQ(expected.n, MOST);
        check_same(&expected, &found);
        append(longer, at + 1, 30);
    }
    bn_session_free(s);
    bn_session_free(longer);
}

/* No more guesses than a pass has rows, and none without a draft. */
static void test_few(void) {
    bn_session *s = session(TEXT, 3, BN_KV_F16);
    append(s, 0, 20);
    CHECK_EQ(guess(s, NULL).n, 3);
    bn_session_free(s);
    end();
    begin(BN_MASK_CAUSAL, 0, 0);
    s = session(TEXT, 128, BN_KV_F16);
    append(s, 0, 20);
    CHECK_EQ(guess(s, NULL).n, 0);
    bn_session_free(s);
}

/* A full context, and a text that the draft has not followed. */
static void test_edges(void) {
    int32_t tokens[8], n = 9;
    float confidences[8];
    bn_session *s = session(20, 128, BN_KV_F16);
    CHECK_EQ(guess(s, NULL).n, 0);
    append(s, 0, 17);
    CHECK_EQ(guess(s, NULL).n, 2);
    model->timings = (bn_timings){0};
    ok(bn_session_step(s, &samplers[2], NULL, 0, tokens, 8, &n));
    CHECK(n <= 3);
    ok(bn_session_rewind(s, 10));
    CHECK_EQ(guess(s, NULL).n, 0);
    append(s, 10, 1);
    CHECK_EQ(guess(s, NULL).n, MOST);
    ok(bn_session_score(s, text, 1, confidences));
    append(s, 10, 1);
    CHECK_EQ(guess(s, NULL).n, 0);
    ok(bn_session_step(s, &samplers[2], NULL, 0, tokens, 8, &n));
    CHECK_EQ(n, 1);
    ok(bn_session_rewind(s, 11));
    append(s, 10, 1);
    CHECK(guess(s, NULL).n > 0);
    n = 77;
    CHECK_EQ(bn_session_guess(s, NULL, VOCAB, 8, tokens, confidences, &n), BN_ERR_TOKEN);
    const bn_sampler wrong = {.top_k = -1};
    CHECK_EQ(bn_session_guess(s, &wrong, 1, 8, tokens, confidences, &n), BN_ERR_ARGUMENT);
    CHECK_EQ(n, 77);
    CHECK_EQ(bn_session_guess(s, NULL, 1, -1, tokens, confidences, &n), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_guess(NULL, NULL, 1, 8, tokens, confidences, &n), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_guess(s, NULL, 1, 8, NULL, confidences, &n), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_step(s, NULL, NULL, 0, tokens, 0, &n), BN_ERR_ARGUMENT);
    bn_session *without;
    ok(bn_session_new(model, &(bn_session_options){.n_ctx = 20, .no_draft = 1}, &without));
    for (int i = 0; i < 2; i++) {
        append(without, 0, 18);
        without = saved_and_loaded(without);
        CHECK_EQ(guess(without, NULL).n, 0);
        ok(bn_session_rewind(without, 0));
    }
    bn_session_free(without);
    append(s, 0, 8);
    CHECK_EQ(bn_session_guess(s, NULL, 1, 8, tokens, confidences, &n), BN_ERR_CONTEXT);
    bn_session_cancel(s);
    CHECK_EQ(bn_session_guess(s, NULL, 1, 8, tokens, confidences, &n), BN_ERR_CANCELLED);
    bn_session_free(s);
}

/* Overwrite keys and values of all layers at a position. */
static void spoil(bn_session *s, size_t position) {
    uint8_t *bytes = malloc(s->cache.parts[0].row);
    CHECK(bytes != NULL);
    bn_cache_read(&s->cache, 0, position + 1, bytes);
    bn_cache_write(&s->cache, 0, position, bytes);
    free(bytes);
}

/* Guesses look back no further than the draft's window, which is shorter here so that the text can
 * be. */
static void test_window(void) {
    enum { WINDOW = 100 };
    size_t *window = (size_t *)(uintptr_t)&model->stack.draft->layers[0].mask.window, was = *window;
    CHECK_EQ(was, BN_DRAFT_WINDOW);
    *window = WINDOW;
    bn_session *s = session(TEXT, 128, BN_KV_F32);
    append(s, 0, PROMPT);
    const guesses expected = guess(s, NULL);
    for (size_t position = 0; position < PROMPT - WINDOW; position++)
        spoil(s, position);
    const guesses found = guess(s, NULL);
    check_same(&expected, &found);
    spoil(s, PROMPT - WINDOW / 2);
    CHECK(guess(s, NULL).confidences[0] != expected.confidences[0]);
    bn_session_free(s);
    *window = was;
}

int main(void) {
    bn_model_info info;
    kind.draft = 1;
    begin(BN_MASK_CAUSAL, 0, 0);
    ok(bn_model_get_info(model, &info));
    CHECK_EQ(info.has_draft, 1);
    test_same_guesses();
    test_same_guesses_beside_others();
    test_same_on_every_machine();
    test_a_guess_that_is_no_number();
    test_failing_draft();
    test_tokens_are_the_same();
    test_edges();
    test_window();
    test_past_the_end();
    test_few();
    end();
    kind.draft = 1;
    begin(BN_MASK_CAUSAL, 40, 2);
    test_same_guesses();
    test_tokens_are_the_same();
    end();
    return 0;
}
