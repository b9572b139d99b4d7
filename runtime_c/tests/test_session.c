/* SPDX-License-Identifier: MIT
 *
 * test_session.c: the promises of a session. The right answer for every text is that of single
 * appends; batches, forks and rewinds must give it bit for bit. Choices are tested in
 * test_choice.c, what a session takes in test_session_room.c.
 */
#define _GNU_SOURCE /* posix_memalign */

#include "session/sampler.h"
#include "session/session.h"

#include <math.h>

#include "session_model.h"
#include "together.h"

static bn_model *model;
static int32_t prompt[PROMPT];
static bn_session_options plain; /* the cache type under test */

/* Sessions of different lengths, together and each alone. */
static void test_batch(void) {
    enum { N = 5 };
    bn_session *together[N], *alone[N];
    uint64_t random = 7;
    for (int i = 0; i < N; i++) {
        ok(bn_session_new(model, &plain, &together[i]));
        ok(bn_session_append(together[i], prompt, 1 + 55 * i, BN_LOGITS_LAST, NULL));
        ok(bn_session_fork(together[i], &alone[i]));
        same_logits(together[i], alone[i]);
    }
    for (int round = 0; round < 20; round++) {
        int32_t tokens[N];
        for (int i = 0; i < N; i++)
            tokens[i] = (int32_t)check_below(&random, VOCAB);
        ok(append_together(together, tokens, N));
        for (int i = 0; i < N; i++) {
            ok(bn_session_append(alone[i], &tokens[i], 1, BN_LOGITS_LAST, NULL));
            same_logits(together[i], alone[i]);
        }
    }
    const int32_t tokens[2] = {1, VOCAB};
    CHECK_EQ(append_together(together, tokens, 2), BN_ERR_TOKEN);
    CHECK_EQ(bn_session_position(together[0]), 22); /* the others continue */
    CHECK_EQ(bn_session_position(together[1]), 76);
    bn_session *twice[2] = {together[0], together[0]};
    CHECK_EQ(append_together(twice, prompt, 2), BN_ERR_ARGUMENT);
    for (int i = 0; i < N; i++) {
        bn_session_free(together[i]);
        bn_session_free(alone[i]);
    }
}

/* Forgotten tokens leave no trace, also next to other tokens in the same tile of keys. */
static void test_fork_and_rewind(void) {
    bn_session *s = prompted(model, &plain, prompt), *copy;
    CHECK(bn_session_logits(s) != NULL); /* which the copy has from the beginning */
    ok(bn_session_fork(s, &copy));
    same_logits(s, copy);
    ok(bn_session_append(s, prompt, 30, BN_LOGITS_LAST, NULL));
    ok(bn_session_rewind(s, PROMPT - 9));
    CHECK(bn_session_logits(s) == NULL);
    int32_t token;
    CHECK_EQ(bn_session_sample(s, NULL, &token), BN_ERR_STATE);
    ok(bn_session_append(s, prompt + PROMPT - 9, 9, BN_LOGITS_LAST, NULL));
    same_logits(s, copy);
    CHECK_EQ(bn_session_rewind(s, PROMPT + 1), BN_ERR_ARGUMENT);
    ok(bn_session_rewind(s, 0));
    CHECK_EQ(bn_session_position(s), 0);
    bn_session_free(s);
    bn_session_free(copy);
}

/* No logits are left by an append that wants none, or that fails in a later piece. */
static void test_no_logits(void) {
    const bn_session_options small = {.kv_type = plain.kv_type, .batch = 4};
    const int32_t bad = prompt[0] ? 0 : 1, tokens[] = {7, 7, 7, 7, 7, bad};
    float *scale = (float *)(uintptr_t)&model->stack.embedding.scales[bad], was = *scale;
    int32_t token;
    float scores[5];
    bn_session *s;
    ok(bn_session_new(model, &small, &s));
    ok(bn_session_append(s, tokens, 5, BN_LOGITS_LAST, NULL));
    CHECK(bn_session_logits(s) != NULL);
    ok(bn_session_append(s, tokens, 3, BN_LOGITS_NONE, NULL));
    CHECK(bn_session_logits(s) == NULL);
    CHECK_EQ(bn_session_sample(s, NULL, &token), BN_ERR_STATE);
    ok(bn_session_append(s, tokens, 1, BN_LOGITS_LAST, NULL));
    bn_entry e = {.session = s, .tokens = tokens, .n_tokens = 2};
    ok(bn_step_batch(&e, 1));
    CHECK(e.n_chosen == 0 && bn_session_logits(s) == NULL);
    *scale = NAN;
    CHECK_EQ(bn_session_append(s, tokens, 6, BN_LOGITS_ALL, NULL), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_position(s), 15); /* one piece was computed */
    CHECK(bn_session_logits(s) == NULL);
    ok(bn_session_rewind(s, 0)); /* its probability after the first piece is no number, too */
    CHECK_EQ(bn_session_score(s, tokens + 1, 5, scores), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_position(s), 0);
    *scale = was;
    bn_session_free(s);
}

/* A logit that is no number spoils the probabilities of all tokens: scoring ends like sampling. */
static void test_other_logit(void) {
    const int32_t tokens[] = {7, 7, 7}, other = 6;
    float *scale = (float *)(uintptr_t)&model->stack.embedding.scales[other], was = *scale;
    int32_t token;
    float scores[3];
    bn_session *s;
    ok(bn_session_new(model, &plain, &s));
    *scale = NAN;
    CHECK_EQ(bn_session_score(s, tokens, 3, scores), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_position(s), 0);
    ok(bn_session_append(s, tokens, 1, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_session_sample(s, NULL, &token), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_score(s, tokens, 1, scores), BN_ERR_NUMERIC);
    *scale = was;
    bn_session_free(s);
}

/* A digest of each row whose logits were requested, also if nobody read them. */
static void test_digests(void) {
    static float all[PROMPT * VOCAB], scores[PROMPT];
    bn_session *s, *alike;
    ok(bn_session_new(model, &plain, &s));
    ok(bn_session_new(model, &plain, &alike));
    ok(bn_session_append(s, prompt, 40, BN_LOGITS_ALL, all));
    ok(bn_session_append(alike, prompt, 40, BN_LOGITS_ALL, NULL));
    CHECK(memcmp(bn_session_digests(s), bn_session_digests(alike), 40 * sizeof(uint64_t)) == 0);
    for (int i = 0; i < 40; i++)
        CHECK(bn_session_digests(s)[i] != 0);
    same_logits(s, alike);
    bn_session_free(alike);
    ok(bn_session_fork(s, &alike));
    CHECK(memcmp(bn_session_digests(s), bn_session_digests(alike), 40 * sizeof(uint64_t)) == 0);
    ok(bn_session_append(s, prompt, 2, BN_LOGITS_LAST, NULL));
    CHECK(bn_session_digests(s)[40] == 0 && bn_session_digests(s)[41] != 0);
    ok(bn_session_rewind(s, 0));
    ok(bn_session_score(s, prompt, 40, scores));
    CHECK(memcmp(bn_session_digests(s), bn_session_digests(alike), 40 * sizeof(uint64_t)) == 0);
    ok(bn_session_rewind(s, 0));
    ok(bn_session_append(s, prompt, 40, BN_LOGITS_NONE, NULL)); /* those of before are gone */
    for (int i = 0; i < 40; i++)
        CHECK(bn_session_digests(s)[i] == 0);
    bn_session_free(s);
    bn_session_free(alike);
}

/* Log probabilities agree with the logits, in one call or two, and leave the session as append
 * does. */
static void test_score(void) {
    static float all[PROMPT * VOCAB];
    float once[PROMPT], twice[PROMPT];
    bn_session *s, *scored, *halves;
    ok(bn_session_new(model, &plain, &s));
    ok(bn_session_new(model, &plain, &scored));
    ok(bn_session_new(model, &plain, &halves));
    ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_ALL, all));
    ok(bn_session_score(scored, prompt, PROMPT, once));
    ok(bn_session_score(halves, prompt, 101, twice));
    ok(bn_session_score(halves, prompt + 101, PROMPT - 101, twice + 101));
    CHECK(isnan(once[0]) && isnan(twice[0]));
    ok(bn_session_rewind(halves, 0));
    ok(bn_session_append(halves, prompt, 2, BN_LOGITS_NONE, NULL));
    twice[0] = 7;
    CHECK_EQ(bn_session_score(halves, prompt, 3, twice), BN_ERR_STATE);
    CHECK(twice[0] == 7 && memcmp(once + 1, twice + 1, 2 * sizeof *once) == 0); /* untouched */
    CHECK(memcmp(once + 1, twice + 1, sizeof once - sizeof *once) == 0);
    for (int i = 1; i < PROMPT; i++) {
        const float *row = all + (i - 1) * VOCAB;
        double sum = 0, top = -INFINITY;
        for (int v = 0; v < VOCAB; v++)
            top = row[v] > top ? row[v] : top;
        for (int v = 0; v < VOCAB; v++)
            sum += exp(row[v] - top);
        const double expected = row[prompt[i]] - top - log(sum);
        /* relative error of the sum below 1e-6, exp's 2e-7 included; then one rounding */
        CHECK_MSG(fabs(once[i] - expected) <= 1e-6 * (1 + fabs(expected)), "%d: %g, expected %g", i,
                  once[i], expected);
    }
    same_logits(s, scored);
    CHECK(memcmp(bn_session_logits(s), all + (PROMPT - 1) * VOCAB, VOCAB * sizeof *all) == 0);
    bn_session_free(s);
    bn_session_free(scored);
    bn_session_free(halves);
}

static void test_refusals(void) {
    bn_session *s;
    bn_session_options options = {.n_ctx = 10};
    const int32_t bad[] = {1, -1};
    int32_t token, n;
    float out;
    ok(bn_session_new(model, &options, &s));
    CHECK_EQ(bn_session_sample(s, NULL, &token), BN_ERR_STATE);
    CHECK_EQ(bn_session_append(s, prompt, 11, BN_LOGITS_NONE, NULL), BN_ERR_CONTEXT);
    CHECK_EQ(bn_session_append(s, prompt, 0, BN_LOGITS_NONE, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_append(s, bad, 2, BN_LOGITS_NONE, NULL), BN_ERR_TOKEN);
    CHECK_EQ(bn_session_append(s, prompt, 1, (bn_logits)3, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_position(s), 0);
    ok(bn_session_append(s, prompt, 10, BN_LOGITS_NONE, NULL));
    CHECK(bn_session_logits(s) == NULL);
    CHECK_EQ(bn_session_score(s, prompt, 1, &out), BN_ERR_CONTEXT);
    CHECK_EQ(bn_session_step(s, NULL, NULL, 0, &token, 1, &n), BN_ERR_CONTEXT);
    ok(bn_session_rewind(s, 5));
    CHECK_EQ(bn_session_score(s, prompt, 1, &out), BN_ERR_STATE);
    bn_session_free(s);
    options.n_ctx = CONTEXT + 1;
    CHECK_EQ(bn_session_new(model, &options, &s), BN_ERR_ARGUMENT);
}

int main(void) {
    size_t size;
    uint8_t *file = open_large_vocabulary(&model, prompt, &size);
    for (plain.kv_type = 0; plain.kv_type < BN_KV_TYPES; plain.kv_type++) {
        test_batch();
        test_fork_and_rewind();
        test_no_logits();
        test_other_logit();
        test_digests();
        test_score();
    }
    test_refusals();
    bn_model_close(model);
    free(file);
    return 0;
}
