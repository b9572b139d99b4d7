/* SPDX-License-Identifier: MIT
 *
 * test_choice.c: which tokens a session chooses. The right answer for every text is that of single
 * appends with all logits computed; drafts, `allowed` and the screened head must give it bit for
 * bit.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "session/session.h"

#include <math.h>

#include "session_model.h"

static bn_model *model;
static int32_t prompt[PROMPT];
static bn_session_options plain; /* the cache type under test */

static const int32_t biased[] = {5, 77, 8999};
static const float bias[] = {3.5f, -INFINITY, 2};

static const bn_sampler samplers[] = {
    {0},
    {.repeat_penalty = 1.3f, .penalty_window = 64},
    {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f},
    {.temperature = 1.5f, .top_k = 100, .n_bias = 3, .bias_tokens = biased, .bias_values = bias},
    {.temperature = 0.5f,
     .top_k = 7,
     .repeat_penalty = 0.7f,
     .presence_penalty = -1,
     .frequency_penalty = 0.5f,
     .penalty_window = 100},
    {.temperature = 1, .top_p = 0.9f, .repeat_penalty = 1.1f, .penalty_window = -1},
    {.temperature = 40, .min_p = 0.05f},
    {.temperature = 1.2f, .min_p = 0.3f, .repeat_penalty = 3, .penalty_window = 100},
    {.temperature = 0.6f, .min_p = 1e-30f},
    {.temperature = 1},
    {.temperature = 40, .repeat_penalty = 1.2f, .penalty_window = 100},
    {.temperature = 40, .top_p = 0.5f},
    {.temperature = 40, .top_k = 156, .repeat_penalty = 1.2f, .penalty_window = 100}, /* of 256 */
    {.temperature = 40, .top_k = 157, .repeat_penalty = 1.2f, .penalty_window = 100},
};
enum { SAMPLERS = sizeof samplers / sizeof *samplers };

/* The right answer: requesting the logits first makes the sampler see all of them. */
static bn_session *reference(const bn_sampler *sampler, int32_t tokens[NEW]) {
    bn_session *s = prompted(model, &plain, prompt);
    for (int i = 0; i < NEW; i++) {
        CHECK(bn_session_logits(s) != NULL);
        ok(bn_session_sample(s, sampler, &tokens[i]));
        ok(bn_session_append(s, &tokens[i], 1, BN_LOGITS_LAST, NULL));
    }
    return s;
}

/* Without such a request, only the logits that the sampler needs are computed; the token is the
 * same. */
static void test_screened_head(const bn_sampler *sampler) {
    int32_t expected[NEW], token;
    bn_session *right = reference(sampler, expected), *s = prompted(model, &plain, prompt);
    for (int i = 0; i < NEW; i++) {
        ok(bn_session_sample(s, sampler, &token));
        CHECK_EQ(token, expected[i]);
        ok(bn_session_append(s, &token, 1, BN_LOGITS_LAST, NULL));
    }
    ok(bn_session_sample(s, sampler, &token)); /* does not change the logits */
    same_logits(s, right);
    bn_session_free(s);
    bn_session_free(right);
}

/* A token that a bias forbids does not hide those that arrive after it. */
static void test_drawn_without_the_first(void) {
    enum { FORBIDDEN = 40 };
    int32_t tokens[FORBIDDEN], expected;
    float values[FORBIDDEN];
    bn_session *s = prompted(model, &plain, prompt), *right = prompted(model, &plain, prompt);
    CHECK(bn_session_logits(right) != NULL);
    for (int32_t n = 0; n < FORBIDDEN; n++)
        values[n] = -INFINITY;
    for (float temperature = 1; temperature < 40; temperature *= 2)
        for (int32_t n = 0; n < FORBIDDEN; n++) {
            const bn_sampler sampler = {.temperature = temperature,
                                        .n_bias = n,
                                        .bias_tokens = tokens,
                                        .bias_values = values};
            ok(bn_session_sample(s, &sampler, &tokens[n]));
            ok(bn_session_sample(right, &sampler, &expected));
            CHECK_EQ(tokens[n], expected);
        }
    bn_session_free(s);
    bn_session_free(right);
}

/* After a choice from half of the tokens, in a call of several texts, all can be chosen. */
static void test_chosen_again(void) {
    static uint32_t half[(VOCAB + 31) / 32];
    const bn_sampler odd = {.allowed = half};
    int32_t chosen[2], token;
    bn_entry entries[2];
    memset(half, 0xaa, sizeof half);
    for (int i = 0; i < 2; i++)
        entries[i] = (bn_entry){.session = prompted(model, &plain, prompt),
                                .tokens = prompt,
                                .n_tokens = 1,
                                .most = 1,
                                .sampler = &odd,
                                .chosen = &chosen[i]};
    ok(bn_step_batch(entries, 2));
    bn_session *s = entries[0].session, *right = entries[1].session;
    CHECK(chosen[0] % 2 == 1 && bn_session_logits(right) != NULL);
    for (int i = 0; i < SAMPLERS; i++) {
        ok(bn_session_sample(s, &samplers[i], &token));
        ok(bn_session_sample(right, &samplers[i], &chosen[1]));
        CHECK_EQ(token, chosen[1]);
    }
    bn_session_free(s);
    bn_session_free(right);
}

/* A head with a bias, and one with a soft-cap, are not screened: their logits are not those of the
 * codes alone. */
static void test_heads_not_screened(void) {
    static float values[VOCAB];
    uint64_t random = 8;
    for (int v = 0; v < VOCAB; v++)
        values[v] = 9 * check_float(&random);
    model->stack.head.bias = values;
    test_screened_head(&samplers[2]);
    model->stack.head.bias = NULL;
    model->stack.config.logit_softcap = 2;
    test_screened_head(&samplers[2]);
    model->stack.config.logit_softcap = 0;
}

enum { WORDS = (VOCAB + 31) / 32 };

/* Rows of bn_sampler.allowed for NEW tokens: one token, several, about as many as are computed one
 * by one, a tenth, nearly all. */
static const uint32_t *allowed_rows(uint64_t random) {
    static uint32_t rows[NEW][WORDS];
    static const size_t several[] = {1, 200, 255, 256, 257, VOCAB / 10, 6 * VOCAB};
    memset(rows, 0, sizeof rows);
    for (int i = 0; i < NEW; i++)
        for (size_t n = several[check_below(&random, 7)]; n > 0; n--) {
            const size_t token = check_below(&random, VOCAB);
            rows[i][token / 32] |= 1u << token % 32;
        }
    return rows[0];
}

/* Tokens that are not allowed are never chosen, and the choice is that from all logits: with the
 * screened head, and with right and wrong drafts. */
static void test_allowed(const bn_sampler *sampler, uint64_t random) {
    const uint32_t *rows = allowed_rows(random);
    bn_sampler p = *sampler;
    int32_t expected[NEW], draft[8], tokens[8], n, token;
    bn_session *right = prompted(model, &plain, prompt), *s = prompted(model, &plain, prompt);
    for (int i = 0; i < NEW; i++) {
        p.allowed = rows + i * WORDS;
        CHECK(bn_session_logits(right) != NULL);
        ok(bn_session_sample(right, &p, &expected[i]));
        CHECK(p.allowed[expected[i] / 32] >> expected[i] % 32 & 1);
        ok(bn_session_append(right, &expected[i], 1, BN_LOGITS_LAST, NULL));
    }
    for (int i = 0; i < NEW; i++) {
        p.allowed = rows + i * WORDS;
        ok(bn_session_sample(s, &p, &token));
        CHECK_EQ(token, expected[i]);
        ok(bn_session_append(s, &token, 1, BN_LOGITS_LAST, NULL));
    }
    same_logits(s, right);
    bn_session_free(s);
    s = prompted(model, &plain, prompt);
    for (int done = 0; done < NEW; done += n) {
        const int32_t n_draft = NEW - done < 8 ? NEW - done : 8;
        for (int i = 0; i < n_draft; i++)
            draft[i] =
                check_below(&random, 6) ? expected[done + i] : (int32_t)check_below(&random, VOCAB);
        p.allowed = rows + done * WORDS;
        ok(bn_session_step(s, &p, draft, n_draft, tokens, n_draft > 0 ? n_draft : 1, &n));
        CHECK(memcmp(tokens, expected + done, (size_t)n * sizeof *tokens) == 0);
    }
    same_logits(s, right);
    const uint32_t none[WORDS] = {0};
    p.allowed = none;
    CHECK_EQ(bn_session_sample(s, &p, &token), BN_ERR_NUMERIC);
    bn_session_free(s);
    bn_session_free(right);
}

/* Drafts of 0..8 tokens, most of them right. */
static void test_drafts(const bn_sampler *sampler, uint64_t random) {
    int32_t expected[NEW], tokens[16], draft[8];
    bn_session *right = reference(sampler, expected), *s = prompted(model, &plain, prompt);
    int done = 0, accepted = 0;
    while (done < NEW) {
        int32_t n_draft = (int32_t)check_below(&random, 9), n;
        n_draft = n_draft < NEW - done ? n_draft : NEW - done;
        for (int i = 0; i < n_draft; i++)
            draft[i] =
                check_below(&random, 5) ? expected[done + i] : (int32_t)check_below(&random, VOCAB);
        ok(bn_session_step(s, sampler, draft, n_draft, tokens, n_draft > 0 ? n_draft : 1, &n));
        CHECK(n >= 1 && n <= (n_draft ? n_draft : 1));
        for (int i = 0; i < n; i++)
            CHECK_EQ(tokens[i], expected[done + i]);
        done += n;
        accepted += n - 1;
        CHECK_EQ(bn_session_position(s), PROMPT + done);
    }
    CHECK(accepted > 5); /* otherwise nothing was tested */
    same_logits(s, right);
    CHECK(memcmp(bn_session_tokens(s) + PROMPT, expected, sizeof expected) == 0);
    bn_session_free(s);
    bn_session_free(right);
}

/* A lone text continues for `moment`, up to `most` tokens or the end of its context; with `allowed`
 * for one token it does not. */
static void test_moment(const bn_sampler *sampler) {
    int32_t expected[NEW], chosen[NEW];
    bn_session *right = reference(sampler, expected), *s = prompted(model, &plain, prompt);
    bn_entry e = {.session = s,
                  .tokens = expected,
                  .n_tokens = 1,
                  .most = NEW - 1,
                  .moment = 1e6f,
                  .sampler = sampler,
                  .chosen = chosen};
    ok(bn_step_batch(&e, 1));
    CHECK(e.n_chosen == NEW - 1 && bn_session_position(s) == PROMPT + NEW - 1);
    CHECK(memcmp(chosen, expected + 1, (NEW - 1) * sizeof *chosen) == 0);
    ok(bn_session_append(s, &expected[NEW - 1], 1, BN_LOGITS_LAST, NULL));
    same_logits(s, right);
    bn_session_free(s);
    bn_session_options small = plain;
    small.n_ctx = PROMPT + 5;
    e.session = s = prompted(model, &small, prompt);
    ok(bn_step_batch(&e, 1));
    CHECK(e.n_chosen == 5 && bn_session_position(s) == PROMPT + 5);
    CHECK(memcmp(chosen, expected + 1, 5 * sizeof *chosen) == 0);
    bn_session_free(s);
    bn_sampler held = *sampler;
    static uint32_t every[(VOCAB + 31) / 32];
    memset(every, 0xff, sizeof every);
    held.allowed = every;
    e.session = s = prompted(model, &plain, prompt);
    e.sampler = &held;
    ok(bn_step_batch(&e, 1));
    CHECK(e.n_chosen == 1 && chosen[0] == expected[1]);
    e.moment = -1;
    CHECK_EQ(bn_step_batch(&e, 1), BN_ERR_ARGUMENT);
    bn_session_free(s);
    bn_session_free(right);
}

/* Texts continue together until one has what it asks for, if each of them may. */
static void test_moment_of_several(const bn_sampler *sampler) {
    enum { TEXTS = 3, FEW = 5 };
    int32_t expected[NEW], chosen[TEXTS][NEW];
    bn_entry e[TEXTS] = {{0}};
    bn_session *right = reference(sampler, expected);
    for (int least = 0; least < 2; least++) {
        for (int i = 0; i < TEXTS; i++)
            e[i] = (bn_entry){.session = prompted(model, &plain, prompt),
                              .tokens = expected,
                              .n_tokens = 1,
                              .most = i == 1 ? FEW : NEW - 1,
                              .moment = i == 2 && least ? 0 : 1e6f,
                              .sampler = sampler,
                              .chosen = chosen[i]};
        ok(bn_step_batch(e, TEXTS));
        CHECK(least ? e[1].n_chosen < FEW : e[1].n_chosen == FEW);
        for (int i = 0; i < TEXTS; i++) { /* repetitions may be guessed, and give more in a pass */
            const int32_t n = e[i].n_chosen;
            CHECK(n > (least ? 0 : 1));
            CHECK(least ? e[i].n_passes == 1 : e[i].n_passes > 1 && e[i].n_passes <= FEW);
            CHECK_EQ(bn_session_position(e[i].session), PROMPT + n);
            CHECK(memcmp(chosen[i], expected + 1, (size_t)n * sizeof *expected) == 0);
            ok(bn_session_append(e[i].session, expected + n, NEW - n, BN_LOGITS_LAST, NULL));
            same_logits(e[i].session, right);
            bn_session_free(e[i].session);
        }
    }
    bn_session_free(right);
}

/* A guess that is not a token is refused, whatever is chosen. */
static void test_wrong_guesses(void) {
    bn_session *s = prompted(model, NULL, prompt);
    int32_t token, tokens[2], n = -7;
    ok(bn_session_sample(s, NULL, &token));
    const int32_t drafts[][2] = {{token, VOCAB}, {token ^ 1, VOCAB}, {VOCAB, token}, {-1, token}};
    bn_entry e = {.session = s, .tokens = &token, .n_tokens = 1, .most = 2, .chosen = tokens};
    e.n_draft = 2;
    for (size_t i = 0; i < sizeof drafts / sizeof *drafts; i++) {
        CHECK_EQ(bn_session_step(s, NULL, drafts[i], 2, tokens, 2, &n), BN_ERR_TOKEN);
        e.draft = drafts[i];
        CHECK_EQ(bn_step_batch(&e, 1), BN_ERR_TOKEN);
    }
    CHECK(n == -7 && bn_session_position(s) == PROMPT && bn_session_logits(s) != NULL);
    bn_session_free(s);
}

/* If no token may follow a right guess, the token before is given, as without the guess, and the
 * next call fails. */
static void test_nothing_after_a_guess(void) {
    static uint32_t rows[2][WORDS];
    bn_session *s = prompted(model, NULL, prompt);
    int32_t chosen[2] = {-7, -7}, guess;
    memset(rows[0], 0xff, sizeof rows[0]);
    bn_entry alone = {.session = prompted(model, NULL, prompt), .tokens = prompt, .n_tokens = 1};
    alone.most = 1, alone.chosen = &guess;
    ok(bn_step_batch(&alone, 1));
    const bn_sampler sampler = {.allowed = rows[0]}, none = {.allowed = rows[1]};
    bn_entry e = alone;
    e.session = s, e.sampler = &sampler, e.draft = &guess, e.n_draft = 1;
    e.most = 2, e.chosen = chosen;
    ok(bn_step_batch(&e, 1));
    CHECK(e.n_chosen == 1 && chosen[0] == guess && chosen[1] == -7);
    CHECK_EQ(bn_session_position(s), PROMPT + 1);
    e.tokens = &guess, e.n_draft = 0, e.sampler = &none;
    CHECK_EQ(bn_step_batch(&e, 1), BN_ERR_NUMERIC);
    CHECK(e.n_chosen == 0 && bn_session_position(s) == PROMPT + 2);
    bn_session_free(alone.session);
    bn_session_free(s);
}

/* A guess is right only if its own row of `allowed` has it, and no more tokens are given than were
 * asked for, however many are guessed. */
static void test_right_guesses_only(void) {
    static uint32_t rows[2][WORDS];
    const bn_sampler sampler = {.allowed = rows[0]};
    bn_session *s = prompted(model, NULL, prompt), *other = prompted(model, NULL, prompt);
    int32_t expected[2], tokens[2] = {-7, -7}, n;
    for (int i = 0; i < 2; i++)
        ok(bn_session_step(other, NULL, NULL, 0, &expected[i], 1, &n));
    memset(rows, 0xff, sizeof rows);
    rows[1][expected[1] / 32] &= ~(1u << expected[1] % 32);
    ok(bn_session_rewind(other, PROMPT - 1));
    ok(bn_session_append(other, prompt + PROMPT - 1, 1, BN_LOGITS_LAST, NULL));
    ok(bn_session_step(other, NULL, expected, 2, tokens, 1, &n));
    CHECK(n == 1 && tokens[0] == expected[0] && tokens[1] == -7);
    ok(bn_session_step(s, &sampler, expected, 2, tokens, 2, &n));
    CHECK(n == 1 && tokens[0] == expected[0] && bn_session_position(s) == PROMPT + 1);
    ok(bn_session_rewind(s, PROMPT - 1));
    CHECK_EQ(bn_session_step(s, NULL, NULL, 0, tokens, 1, &n), BN_ERR_STATE);
    bn_entry e = {.session = s, .tokens = prompt + PROMPT - 1, .n_tokens = 1, .most = 2};
    e.sampler = &sampler, e.draft = expected, e.n_draft = 1, e.chosen = tokens;
    ok(bn_step_batch(&e, 1));
    CHECK(e.n_chosen == 2 && tokens[0] == expected[0] && tokens[1] != expected[1]);
    bn_session_free(other);
    bn_session_free(s);
}

/* Only three tokens can be chosen, each once. A lone text goes on as far as it can; the next call
 * fails. */
static void test_nothing_to_go_on_with(void) {
    static int32_t tokens[VOCAB], chosen[NEW];
    static float values[VOCAB];
    const bn_sampler sampler = {.presence_penalty = 3e38f,
                                .frequency_penalty = 3e38f,
                                .penalty_window = NEW,
                                .n_bias = VOCAB - 3,
                                .bias_tokens = tokens,
                                .bias_values = values};
    bn_session *s;
    for (int32_t i = 0; i < VOCAB; i++) {
        tokens[i] = i;
        values[i] = -INFINITY;
    }
    ok(bn_session_new(model, NULL, &s));
    bn_entry e = {.session = s, .tokens = tokens, .n_tokens = 1, .most = NEW, .moment = 1e6f};
    e.sampler = &sampler, e.chosen = chosen;
    ok(bn_step_batch(&e, 1));
    CHECK(e.n_chosen == 3 && e.most == NEW && bn_session_position(s) == 3);
    CHECK(memcmp(bn_session_tokens(s) + 1, chosen, 2 * sizeof *chosen) == 0);
    e.tokens = chosen + 2;
    CHECK_EQ(bn_step_batch(&e, 1), BN_ERR_NUMERIC);
    CHECK_EQ(e.n_chosen, 0);
    ok(bn_session_rewind(s, 3));
    const int32_t piece[] = {chosen[2], tokens[0]};
    e.tokens = piece, e.n_tokens = 2;
    CHECK_EQ(bn_step_batch(&e, 1), BN_ERR_NUMERIC);
    CHECK_EQ(e.n_chosen, 0);
    bn_session_free(s);
}

/* Penalties skip vectors, and reach no further back than the text: what lies in memory before the
 * tokens is not read, and what lies before the logits is not written. */
static void test_penalties_beside_vectors(void) {
    const bn_sampler sampler = {.repeat_penalty = 1.3f, .penalty_window = 100};
    const float vector[DIM] = {1, 2, 3};
    int32_t token, expected;
    bn_session *s;
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_append_embeddings(s, vector, 1, BN_LOGITS_NONE, NULL));
    ok(bn_session_append(s, prompt, 3, BN_LOGITS_LAST, NULL));
    memset(s->listed, 0x7f, VOCAB * sizeof *s->listed);
    s->pool[DIM - 1] = 7;
    CHECK(s->pool + DIM == s->logits);
    ok(bn_session_sample(s, &sampler, &token));
    CHECK(s->pool[DIM - 1] == 7);
    CHECK(bn_session_logits(s) != NULL);
    ok(bn_session_sample(s, &sampler, &expected));
    CHECK_EQ(token, expected);
    bn_session_free(s);
}

/* A text with an invalid sampler is not changed, and the others continue. Another invalid argument
 * changes none. */
static void test_wrong_sampler(void) {
    const bn_sampler wrong = {.temperature = (float)NAN};
    bn_session *s = prompted(model, NULL, prompt), *other = prompted(model, NULL, prompt);
    int32_t chosen[2] = {-7, -7};
    bn_entry entries[2] = {{.session = s, .sampler = &wrong}, {.session = other}};
    for (int i = 0; i < 2; i++) {
        entries[i].tokens = prompt;
        entries[i].n_tokens = entries[i].most = 1;
        entries[i].chosen = &chosen[i];
    }
    CHECK_EQ(bn_step_batch(entries, 2), BN_ERR_ARGUMENT);
    CHECK(entries[0].status == BN_ERR_ARGUMENT && entries[1].status == BN_OK);
    CHECK(bn_session_position(s) == PROMPT && bn_session_position(other) == PROMPT + 1);
    CHECK(chosen[0] == -7 && entries[0].n_chosen == 0 && entries[1].n_chosen == 1);
    entries[0].n_tokens = 0; /* refuses the call, which every entry says */
    entries[0].status = BN_OK;
    CHECK_EQ(bn_step_batch(entries, 2), BN_ERR_ARGUMENT);
    for (int i = 0; i < 2; i++)
        CHECK(entries[i].status == BN_ERR_ARGUMENT && entries[i].n_chosen == 0);
    CHECK(bn_session_position(s) == PROMPT && bn_session_position(other) == PROMPT + 1);
    bn_session_free(s);
    bn_session_free(other);
}

int main(void) {
    size_t size;
    uint8_t *file = open_large_vocabulary(&model, prompt, &size);
    for (int i = 0; i < SAMPLERS; i++) {
        test_screened_head(&samplers[i]);
        test_drafts(&samplers[i], (uint64_t)i);
        test_allowed(&samplers[i], (uint64_t)i);
        test_moment(&samplers[i]);
        test_moment_of_several(&samplers[i]);
    }
    for (plain.kv_type = 0; plain.kv_type < BN_KV_TYPES; plain.kv_type++)
        test_drafts(&samplers[2], 9);
    plain.kv_type = BN_KV_F16;
    test_drawn_without_the_first();
    test_chosen_again();
    test_heads_not_screened();
    test_wrong_guesses();
    test_nothing_after_a_guess();
    test_right_guesses_only();
    test_penalties_beside_vectors();
    test_nothing_to_go_on_with();
    test_wrong_sampler();
    bn_model_close(model);
    free(file);
    return 0;
}
