/* SPDX-License-Identifier: MIT
 *
 * test_embed.c: the embedding of a text, alone and with others; and a model without a head.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "session/session.h"

#include <math.h>

#include "session_model.h"
#include "together.h"

static bn_model *model;
static int32_t prompt[PROMPT];
static bn_session_options plain; /* the cache type under test */

/* The embedding of a text follows from its states: compared with single appends, whose last state
 * the session keeps. Pieces and forks give the same bits. */
static void test_embed(void) {
    enum { N = 40 };
    const bn_pooling kinds[] = {BN_POOL_LAST, BN_POOL_MEAN, BN_POOL_FIRST};
    static double expected[4][DIM];
    bn_session *s, *single;
    memset(expected, 0, sizeof expected);
    ok(bn_session_new(model, &plain, &single));
    for (int i = 0; i < N; i++) {
        double squares = 0, h[DIM];
        ok(bn_session_append(single, prompt + i, 1, BN_LOGITS_LAST, NULL));
        for (int d = 0; d < DIM; d++)
            squares += (double)single->hidden[d] * (double)single->hidden[d];
        for (int d = 0; d < DIM; d++) {
            h[d] = (double)single->hidden[d] * (double)model->stack.final_norm.gain[d];
            h[d] /= sqrt(squares / (double)DIM + (double)model->stack.config.norm_eps);
            expected[BN_POOL_LAST][d] = h[d];
            expected[BN_POOL_MEAN][d] += h[d];
            expected[BN_POOL_FIRST][d] = i == 0 ? h[d] : expected[BN_POOL_FIRST][d];
        }
    }
    ok(bn_session_new(model, &plain, &s));
    for (size_t k = 0; k < 3; k++) {
        float whole[DIM], pieces[DIM];
        double squares = 0;
        bn_session *copy;
        ok(bn_session_rewind(s, 0));
        ok(bn_session_embed(s, prompt, N, kinds[k], whole));
        ok(bn_session_rewind(s, 0));
        ok(bn_session_embed(s, prompt, 13, kinds[k], NULL));
        CHECK_EQ(bn_session_embed(s, prompt, 1, kinds[(k + 1) % 3], NULL), BN_ERR_STATE);
        ok(bn_session_fork(s, &copy));
        ok(bn_session_embed(copy, prompt + 13, N - 13, kinds[k], pieces));
        CHECK(memcmp(whole, pieces, sizeof whole) == 0);
        for (int d = 0; d < DIM; d++)
            squares += expected[kinds[k]][d] * expected[kinds[k]][d];
        for (int d = 0; d < DIM; d++) /* fp32 of sums of 48 and 40 terms, each term below 1 */
            CHECK(fabs(whole[d] - expected[kinds[k]][d] / sqrt(squares)) < 1e-5);
        CHECK(bn_session_logits(copy) == NULL);
        bn_session_free(copy);
    }
    CHECK_EQ(bn_session_embed(single, prompt, 1, BN_POOL_LAST, NULL), BN_ERR_STATE);
    ok(bn_session_rewind(s, 5)); /* which forgets the pool */
    CHECK_EQ(bn_session_embed(s, prompt, 1, kinds[2], NULL), BN_ERR_STATE);
    /* also for tokens appended by another function */
    ok(bn_session_append(s, prompt, 8, BN_LOGITS_NONE, NULL));
    CHECK_EQ(bn_session_embed(s, prompt, 1, kinds[2], NULL), BN_ERR_STATE);
    ok(bn_session_rewind(s, 0));
    CHECK_EQ(bn_session_embed(s, prompt, 1, BN_POOL_MODEL, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_embed(s, prompt, 1, (bn_pooling)4, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_embed(s, prompt, CONTEXT + 1, BN_POOL_LAST, NULL), BN_ERR_CONTEXT);
    CHECK_EQ(bn_session_position(s), 0);
    bn_session_free(s);
    bn_session_free(single);
}

/* A call that fails leaves the pool as it was, to continue. */
static void test_failed(void) {
    float *scale = (float *)(uintptr_t)&model->stack.embedding.scales[prompt[6]], was = *scale;
    float whole[DIM], again[DIM];
    bn_session *s;
    ok(bn_session_new(model, &plain, &s));
    ok(bn_session_embed(s, prompt, 7, BN_POOL_MEAN, whole));
    ok(bn_session_rewind(s, 0));
    ok(bn_session_embed(s, prompt, 4, BN_POOL_MEAN, NULL));
    *scale = NAN;
    CHECK_EQ(bn_session_embed(s, prompt + 4, 3, BN_POOL_MEAN, NULL), BN_ERR_NUMERIC);
    *scale = was;
    CHECK_EQ(bn_session_position(s), 4);
    ok(bn_session_embed(s, prompt + 4, 3, BN_POOL_MEAN, again));
    CHECK(memcmp(whole, again, sizeof whole) == 0);
    bn_session_free(s);
}

/* Of texts together, the first session without all of its text is that of a value that is not
 * finite. The others can continue. */
static void test_which_failed(void) {
    enum { N = 5, BAD = 99 };
    int32_t text[N][40];
    const int32_t *texts[N], lengths[N] = {3, 40, 5, 7, 2};
    float *scale = (float *)(uintptr_t)&model->stack.embedding.scales[BAD], was = *scale;
    float out[N][DIM], alone[DIM];
    bn_session *s[N];
    for (int bad = 0; bad < N; bad++) {
        for (int i = 0; i < N; i++) {
            ok(bn_session_new(model, &plain, &s[i]));
            ok(bn_session_embed(s[i], prompt, 2, BN_POOL_MEAN, NULL));
            for (int j = 0; j < lengths[i]; j++)
                text[i][j] = (i + j) % 50;
            texts[i] = text[i];
        }
        text[bad][lengths[bad] - 1] = BAD;
        *scale = NAN;
        CHECK_EQ(bn_embed_batch(s, texts, lengths, N, BN_POOL_MEAN, out[0]), BN_ERR_NUMERIC);
        *scale = was;
        for (int i = 0; i < N; i++) {
            const int32_t held = bn_session_position(s[i]) - 2;
            CHECK(i < bad ? held == lengths[i] : held < lengths[i]);
            if (i < bad)
                continue;
            ok(bn_session_embed(s[i], texts[i] + held, lengths[i] - held, BN_POOL_MEAN, out[i]));
            ok(bn_session_rewind(s[i], 0));
            ok(bn_session_embed(s[i], prompt, 2, BN_POOL_MEAN, NULL));
            ok(bn_session_embed(s[i], texts[i], lengths[i], BN_POOL_MEAN, alone));
            CHECK(memcmp(out[i], alone, sizeof alone) == 0);
        }
        for (int i = 0; i < N; i++)
            bn_session_free(s[i]);
    }
}

/* Vectors whose length is not a float, and 0. */
static void test_length(void) {
    static const float zero[DIM];
    static float huge[DIM], out[DIM];
    const float *was = model->stack.final_norm.gain;
    bn_session *s;
    for (int d = 0; d < DIM; d++)
        huge[d] = 1e30f;
    ok(bn_session_new(model, &plain, &s));
    model->stack.final_norm.gain = huge;
    CHECK_EQ(bn_session_embed(s, prompt, 3, BN_POOL_MEAN, out), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_position(s), 0); /* so that it can be told from others */
    model->stack.final_norm.gain = zero;
    ok(bn_session_embed(s, prompt, 3, BN_POOL_MEAN, out));
    for (int d = 0; d < DIM; d++)
        CHECK_EQ(out[d], 0);
    model->stack.final_norm.gain = was;
    bn_session_free(s);
}

/* Texts embedded together give the same bits as alone, also if one continues, and if the first
 * session is short. */
static void test_embed_batch(void) {
    enum { N = 6 };
    const int32_t lengths[N] = {3, 1, 250, 40, 2, 128}, more[N] = {1, 5, 1, 1, 1, 9};
    const int32_t *texts[N];
    const bn_session_options small = {.n_ctx = 4, .kv_type = plain.kv_type};
    bn_session *together[N], *alone[N];
    static float out[N][DIM], expected[N][DIM];
    for (int i = 0; i < N; i++) {
        texts[i] = prompt;
        ok(bn_session_new(model, i == 0 ? &small : &plain, &together[i]));
        ok(bn_session_new(model, &plain, &alone[i]));
    }
    for (int pooling = BN_POOL_LAST; pooling <= BN_POOL_FIRST; pooling++) {
        for (int round = 0; round < 2; round++) {
            const int32_t *n = round ? more : lengths;
            ok(bn_embed_batch(together, texts, n, N, (bn_pooling)pooling, out[0]));
            for (int i = 0; i < N; i++)
                ok(bn_session_embed(alone[i], prompt, n[i], (bn_pooling)pooling, expected[i]));
            CHECK(memcmp(out, expected, sizeof out) == 0);
            CHECK_EQ(bn_session_position(together[2]), 250 + round);
            CHECK(memcmp(bn_session_tokens(together[5]), bn_session_tokens(alone[5]),
                         128 * sizeof *prompt) == 0);
        }
        for (int i = 0; i < N; i++) {
            ok(bn_session_rewind(together[i], 0));
            ok(bn_session_rewind(alone[i], 0));
        }
    }
    const int32_t wrong[N] = {1, 1, 1, 1, 1, 0};
    CHECK_EQ(bn_embed_batch(together, texts, wrong, N, BN_POOL_LAST, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_embed_batch(together, texts, more, 0, BN_POOL_LAST, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_embed_batch(together, texts, more, N, BN_POOL_MODEL, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_position(together[0]), 0);
    bn_session *const twice[2] = {together[0], together[0]};
    CHECK_EQ(bn_embed_batch(twice, texts, wrong, 2, BN_POOL_LAST, NULL), BN_ERR_ARGUMENT);
    for (int i = 0; i < N; i++) {
        bn_session_free(together[i]);
        bn_session_free(alone[i]);
    }
}

/* A model without a head refuses to give logits, before any work. */
static void test_no_head(const uint8_t *file, size_t size) {
    uint8_t *bytes = tiny_copy(file, size);
    tiny_put(bytes + tiny_section(bytes, 1) + 4 * 28, 0, 4); /* has_head; it was tied */
    tiny_put(bytes + tiny_section(bytes, 1) + 4 * 27, BN_POOL_MEAN, 4);
    tiny_fix_checksums(bytes, size);
    bn_model *headless, *with_head = model;
    bn_model_info info;
    bn_session *s, *right;
    float out[2][DIM], score[2];
    int32_t token, n;
    ok(bn_model_open_bytes(bytes, size, NULL, &headless, NULL));
    ok(bn_model_get_info(headless, &info));
    CHECK(info.has_head == 0 && info.pooling == BN_POOL_MEAN);
    ok(bn_session_new(headless, &plain, &s));
    CHECK_EQ(bn_session_append(s, prompt, 2, BN_LOGITS_LAST, NULL), BN_ERR_NO_HEAD);
    CHECK_EQ(bn_session_append(s, prompt, 2, BN_LOGITS_ALL, NULL), BN_ERR_NO_HEAD);
    CHECK_EQ(bn_session_score(s, prompt, 2, score), BN_ERR_NO_HEAD);
    CHECK_EQ(append_together(&s, prompt, 1), BN_ERR_NO_HEAD);
    CHECK_EQ(bn_session_position(s), 0);
    ok(bn_session_embed(s, prompt, 9, BN_POOL_MODEL, out[0]));
    CHECK_EQ(bn_session_sample(s, NULL, &token), BN_ERR_STATE);
    CHECK_EQ(bn_session_step(s, NULL, NULL, 0, &token, 1, &n), BN_ERR_STATE);
    ok(bn_session_new(with_head, &plain, &right));
    ok(bn_session_embed(right, prompt, 9, BN_POOL_MEAN, out[1]));
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    bn_session_free(s);
    bn_session_free(right);
    bn_model_close(headless);
    free(bytes);
}

int main(void) {
    size_t size;
    uint8_t *file = open_large_vocabulary(&model, prompt, &size);
    for (plain.kv_type = 0; plain.kv_type < BN_KV_TYPES; plain.kv_type++) {
        test_embed();
        test_failed();
        test_which_failed();
        test_length();
        test_embed_batch();
    }
    plain.kv_type = BN_KV_F16;
    test_no_head(file, size);
    bn_model_close(model);
    free(file);
    return 0;
}
