/* SPDX-License-Identifier: MIT
 *
 * test_masks.c: what tokens see, for whole texts, prefixes, windows and vectors in place of tokens.
 * The number of rows in a pass, what else is in it and where the cache forgets must not change a
 * bit; correctness is tested against torch (tests/test_masks.py).
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "forward.h"

#include <math.h>

#include "mask_model.h"
#include "together.h"

/* --- whole texts --- */

/* Logits of all n tokens: a whole text, or a prefix of `prefix` and what follows in two pieces. */
static void run(bn_session *s, int32_t prefix, int32_t n, float *out) {
    const int32_t cut = prefix + (n - prefix) / 3;
    ok(bn_session_rewind(s, 0));
    if (kind.mask == BN_MASK_BIDIRECTIONAL) {
        ok(bn_session_append(s, text, n, BN_LOGITS_ALL, out));
        return;
    }
    if (prefix > 0)
        ok(bn_session_append_prefix(s, text, NULL, prefix, BN_LOGITS_ALL, out));
    if (cut > prefix)
        ok(bn_session_append(s, text + prefix, cut - prefix, BN_LOGITS_ALL, out + prefix * VOCAB));
    if (n > cut)
        ok(bn_session_append(s, text + cut, n - cut, BN_LOGITS_ALL, out + cut * VOCAB));
}

/* One pass or many pieces, all tiers and thread counts: the same bits. */
static void test_whole(uint32_t mask, uint32_t window, uint32_t global_every) {
    static float right[TEXT * VOCAB], found[TEXT * VOCAB];
    const int32_t longest = window > BN_CHUNK_KEYS ? TEXT : 300; /* slow under a sanitizer */
    const int32_t lengths[] = {1, 17, 131, longest}, batches[] = {4096, 128, 7};
    begin(mask, window, global_every);
    bn_model_close(model);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const int32_t n = lengths[i], prefix = mask == BN_MASK_PREFIX ? n - n / 4 : 0;
        const size_t bytes = (size_t)n * VOCAB * sizeof *right;
        open_model("scalar", 1);
        bn_session *s = session(TEXT, 4096, BN_KV_INT8);
        run(s, prefix, n, right);
        bn_session_free(s);
        bn_model_close(model);
        for (int32_t tier = 0; bn_isa_name(tier); tier++) {
            const int32_t threads = 1 + (tier + (int32_t)i) % 3;
            open_model(bn_isa_name(tier), threads);
            s = session(n, batches[tier % 3], BN_KV_INT8);
            run(s, prefix, n, found);
            CHECK_MSG(memcmp(found, right, bytes) == 0, "%s, %d threads, %d tokens",
                      bn_isa_name(tier), threads, n);
            bn_session_free(s);
            bn_model_close(model);
        }
    }
    open_model(NULL, 2);
    end();
}

/* A prefix of one token equals a causal text; one of two does not, and earlier tokens matter. */
static void test_prefix_is_seen(void) {
    float causal[2][VOCAB], one[2][VOCAB], two[2][VOCAB];
    begin(BN_MASK_PREFIX, 0, 0);
    bn_session *s = session(TEXT, 0, 0);
    ok(bn_session_append(s, text, 2, BN_LOGITS_ALL, causal[0]));
    run(s, 1, 2, one[0]);
    CHECK(memcmp(one, causal, sizeof one) == 0);
    run(s, 2, 2, two[0]);
    CHECK(memcmp(two[0], causal[0], sizeof two[0]) != 0);
    CHECK(memcmp(two[1], causal[1], sizeof two[1]) != 0); /* because the tokens it sees have seen
                                                           * it */
    bn_session_free(s);
    end();
}

/* --- rewinding --- */

static void test_rewind_prefix(void) {
    float before[VOCAB], after[VOCAB];
    bn_session *copy;
    begin(BN_MASK_PREFIX, 0, 0);
    bn_session *s = session(100, 8, 0);
    CHECK_EQ(bn_session_rewind_least(s), 0);
    ok(bn_session_append_prefix(s, text, NULL, 30, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_session_rewind_least(s), 30);
    CHECK_EQ(bn_session_append_prefix(s, text, NULL, 3, BN_LOGITS_NONE, NULL), BN_ERR_STATE);
    ok(bn_session_append(s, text + 30, 9, BN_LOGITS_LAST, before));
    CHECK_EQ(bn_session_rewind(s, 29), BN_ERR_STATE);
    CHECK_EQ(bn_session_position(s), 39);
    CHECK(bn_session_logits(s) != NULL); /* nothing was changed */
    ok(bn_session_rewind(s, 30));
    ok(bn_session_fork(s, &copy));
    CHECK_EQ(bn_session_rewind_least(copy), 30);
    ok(bn_session_append(copy, text + 30, 9, BN_LOGITS_LAST, after));
    CHECK(memcmp(before, after, sizeof before) == 0);
    ok(bn_session_rewind(s, 0));
    CHECK_EQ(bn_session_rewind_least(s), 0);
    ok(bn_session_append(s, text, 5, BN_LOGITS_LAST, before));
    ok(bn_session_rewind(s, 2)); /* the prefix is gone */
    CHECK_EQ(bn_session_append_prefix(s, text, NULL, 1, BN_LOGITS_NONE, NULL), BN_ERR_STATE);
    bn_session_free(copy);
    bn_session_free(s);
    end();
}

static void test_bidirectional_refusals(void) {
    float out[VOCAB];
    int32_t token, n;
    bn_session *copy;
    begin(BN_MASK_BIDIRECTIONAL, 0, 0);
    bn_session *s = session(100, 8, 0);
    CHECK_EQ(bn_session_score(s, text, 3, out), BN_ERR_MASK);
    CHECK_EQ(append_together(&s, text, 1), BN_ERR_MASK);
    CHECK_EQ(bn_session_append_prefix(s, text, NULL, 3, BN_LOGITS_NONE, NULL), BN_ERR_MASK);
    CHECK_EQ(bn_session_position(s), 0);
    ok(bn_session_append(s, text, 30, BN_LOGITS_LAST, out));
    CHECK_EQ(bn_session_append(s, text, 1, BN_LOGITS_LAST, out), BN_ERR_STATE);
    CHECK_EQ(bn_session_embed(s, text, 1, BN_POOL_MEAN, NULL), BN_ERR_STATE);
    CHECK_EQ(bn_session_sample(s, NULL, &token), BN_ERR_MASK);
    CHECK_EQ(bn_session_step(s, NULL, NULL, 0, &token, 1, &n), BN_ERR_MASK);
    CHECK_EQ(bn_session_score(s, text, 3, out), BN_ERR_MASK);
    CHECK_EQ(append_together(&s, text, 1), BN_ERR_MASK);
    CHECK_EQ(bn_session_rewind_least(s), 30);
    CHECK_EQ(bn_session_rewind(s, 29), BN_ERR_STATE);
    ok(bn_session_rewind(s, 30));
    ok(bn_session_fork(s, &copy));
    CHECK(memcmp(bn_session_logits(copy), out, sizeof out) == 0);
    ok(bn_session_rewind(s, 0));
    bn_session_cancel(s);
    CHECK_EQ(bn_session_append(s, text, 30, BN_LOGITS_NONE, NULL), BN_ERR_CANCELLED);
    CHECK_EQ(bn_session_rewind_least(s), 0);
    bn_session_free(copy);
    bn_session_free(s);
    end();
    begin(BN_MASK_CAUSAL, 0, 0);
    s = session(10, 0, 0);
    CHECK_EQ(bn_session_append_prefix(s, text, NULL, 3, BN_LOGITS_NONE, NULL), BN_ERR_MASK);
    bn_session_free(s);
    end();
}

/* A norm kernel that cancels a session at its first call. */
static bn_normalize *usual_norm;
static _Atomic(bn_session *) target;

static int cancelling_norm(const bn_norming *a) {
    bn_session_cancel(atomic_exchange(&target, NULL));
    return usual_norm(a);
}

static void cancel_within(bn_session *s) {
    usual_norm = model->kernels.vectors.rms_norm;
    model->kernels.vectors.rms_norm = cancelling_norm;
    atomic_store(&target, s);
}

/* A long text that must come whole is cancelled midway and leaves nothing behind, however much room
 * other sessions of the model requested. */
static void test_stopped_pass(uint32_t mask) {
    float expected[VOCAB], found[VOCAB];
    begin(mask, 0, 0);
    bn_session *s = session(200, 8, 0), *roomy = session(TEXT, 4096, 0);
    for (int round = 0; round < 3; round++) {
        if (mask == BN_MASK_PREFIX)
            ok(bn_session_append_prefix(s, text, NULL, 200, BN_LOGITS_LAST, expected));
        else
            ok(bn_session_append(s, text, 200, BN_LOGITS_LAST, expected));
        CHECK(round == 0 || memcmp(expected, found, sizeof found) == 0);
        memcpy(found, expected, sizeof found);
        ok(bn_session_rewind(s, 0));
        cancel_within(s);
        CHECK_EQ(mask == BN_MASK_PREFIX
                     ? bn_session_append_prefix(s, text, NULL, 200, BN_LOGITS_NONE, NULL)
                     : bn_session_embed(s, text, 200, BN_POOL_LAST, NULL),
                 BN_ERR_CANCELLED);
        model->kernels.vectors.rms_norm = usual_norm;
        CHECK_EQ(bn_session_position(s), 0);
        CHECK_EQ(bn_session_rewind_least(s), 0);
        CHECK(bn_session_cancelled(s) && !bn_session_logits(s));
        ok(bn_session_rewind(s, 0));
    }
    bn_session_free(roomy);
    bn_session_free(s);
    end();
}

/* In a pass over tokens of several texts a cancel takes effect at the next call, however small
 * their blocks. */
static void test_batch_is_not_stopped(void) {
    begin(BN_MASK_PREFIX, 0, 0);
    bn_session *two[2] = {session(10, 1, 0), session(10, 1, 0)};
    for (int i = 0; i < 2; i++)
        ok(bn_session_append_prefix(two[i], text, NULL, 2, BN_LOGITS_NONE, NULL));
    cancel_within(two[0]);
    ok(append_together(two, text, 2));
    model->kernels.vectors.rms_norm = usual_norm;
    CHECK_EQ(append_together(two, text, 2), BN_ERR_CANCELLED);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(bn_session_position(two[i]), 3 + i); /* the other continues */
        bn_session_free(two[i]);
    }
    end();
}

/* --- vectors of texts --- */

/* The texts are more than a pass has room for. */
static void test_embed(uint32_t window) {
    enum { N = 9 };
    const int32_t lengths[N] = {3, 1, 250, 40, 2, 20, 5, 300, 290};
    const int32_t *texts[N];
    bn_session *together[N];
    float out[N][DIM], alone[DIM];
    begin(BN_MASK_BIDIRECTIONAL, window, 0);
    CHECK_EQ(model->stack.cached[window > 0], 1); /* all layers have the same memory */
    for (int i = 0; i < N; i++) {
        texts[i] = text + i;
        together[i] = session(i == 0 ? 100 : 300, 64, 0);
    }
    bn_session *s = session(300, 4, 0);
    for (int pooling = BN_POOL_LAST; pooling <= BN_POOL_FIRST; pooling++) {
        ok(bn_embed_batch(together, texts, lengths, N, (bn_pooling)pooling, out[0]));
        for (int i = 0; i < N; i++) {
            ok(bn_session_rewind(s, 0));
            ok(bn_session_embed(s, texts[i], lengths[i], (bn_pooling)pooling, alone));
            CHECK_MSG(memcmp(alone, out[i], sizeof alone) == 0, "text %d", i);
            CHECK_EQ(bn_session_position(together[i]), lengths[i]);
            ok(bn_session_rewind(together[i], 0));
        }
    }
    for (int i = 0; i < N; i++)
        bn_session_free(together[i]);
    bn_session_free(s);
    end();
}

/* --- vectors in place of tokens --- */

static void vectors_of(int32_t first, int32_t n, float *out) {
    for (int32_t i = 0; i < n; i++)
        bn_embed(model, &model->stack, text[first + i], out + i * DIM);
}

/* The embedding vector of a token acts as that token. */
static void test_embeddings(uint32_t mask) {
    static float vectors[30 * DIM], right[30 * VOCAB], found[30 * VOCAB];
    float a[DIM], b[DIM];
    int32_t token;
    const bn_sampler penalties = {
        .repeat_penalty = 1.5f, .frequency_penalty = 0.5f, .penalty_window = -1};
    begin(mask, 0, 0);
    bn_session *s = session(40, 8, 0), *v = session(40, 8, 0);
    vectors_of(0, 30, vectors);
    ok(bn_session_append(s, text, 30, BN_LOGITS_ALL, right));
    ok(bn_session_append_embeddings(v, vectors, 30, BN_LOGITS_ALL, found));
    CHECK(memcmp(right, found, sizeof right) == 0);
    for (int i = 0; i < 30; i++)
        CHECK_EQ(bn_session_tokens(v)[i], BN_NO_TOKEN);
    if (mask != BN_MASK_BIDIRECTIONAL) { /* penalties skip the vectors */
        float row[VOCAB];
        memcpy(row, right + 29 * VOCAB, sizeof row);
        row[text[0]] = row[text[0]] > 0 ? row[text[0]] / 1.5f : row[text[0]] * 1.5f;
        ok(bn_session_append(v, text, 1, BN_LOGITS_LAST, row));
        row[text[0]] = (row[text[0]] > 0 ? row[text[0]] / 1.5f : row[text[0]] * 1.5f) - 0.5f;
        int32_t best = 0;
        for (int32_t i = 0; i < VOCAB; i++)
            best = row[i] > row[best] ? i : best;
        ok(bn_session_sample(v, &penalties, &token));
        CHECK_EQ(token, best);
    }
    ok(bn_session_rewind(s, 0));
    ok(bn_session_rewind(v, 0));
    ok(bn_session_embed(s, text, 30, BN_POOL_MEAN, a));
    ok(bn_session_embed_embeddings(v, vectors, 30, BN_POOL_MEAN, b));
    CHECK(memcmp(a, b, sizeof a) == 0);
    ok(bn_session_rewind(v, 0));
    CHECK_EQ(bn_session_append_embeddings(v, NULL, 3, BN_LOGITS_NONE, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_append_embeddings(v, vectors, 0, BN_LOGITS_NONE, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_append_embeddings(v, vectors, 41, BN_LOGITS_NONE, NULL), BN_ERR_CONTEXT);
    vectors[29 * DIM + 3] = NAN;
    CHECK_EQ(bn_session_append_embeddings(v, vectors, 30, BN_LOGITS_NONE, NULL), BN_ERR_NUMERIC);
    vectors[29 * DIM + 3] = 3e38f; /* overflows when squared */
    vectors[29 * DIM + 4] = 3e38f;
    CHECK_EQ(bn_session_append_embeddings(v, vectors + 25 * DIM, 5, BN_LOGITS_NONE, NULL),
             BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_position(v), 0);
    CHECK_EQ(bn_session_rewind_least(v), 0);
    vectors_of(0, 30, vectors);
    ok(bn_session_append_embeddings(v, vectors, 30, BN_LOGITS_ALL,
                                    found)); /* as if nothing had happened */
    CHECK(memcmp(right, found, sizeof right) == 0);
    bn_session_free(s);
    bn_session_free(v);
    end();
}

/* A prefix of tokens and vectors, in any order. */
static void test_mixed_prefix(void) {
    float vectors[20 * DIM], right[VOCAB], found[VOCAB];
    const float huge[DIM] = {3e38f, 3e38f}; /* overflow when squared */
    int32_t mixed[20], n = 0;
    begin(BN_MASK_PREFIX, 9, 0);
    bn_session *s = session(40, 8, 0);
    for (int32_t i = 0; i < 20; i++) {
        mixed[i] = i % 3 == 1 ? text[i] : BN_NO_TOKEN;
        if (mixed[i] == BN_NO_TOKEN)
            vectors_of(i, 1, vectors + n++ * DIM);
    }
    ok(bn_session_append_prefix(s, text, NULL, 20, BN_LOGITS_LAST, right));
    ok(bn_session_rewind(s, 0));
    ok(bn_session_append_prefix(s, mixed, vectors, 20, BN_LOGITS_LAST, found));
    CHECK(memcmp(right, found, sizeof right) == 0);
    CHECK(memcmp(bn_session_tokens(s), mixed, sizeof mixed) == 0);
    CHECK_EQ(bn_session_append_embeddings(s, huge, 1, BN_LOGITS_LAST, found), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_rewind_least(s), 20); /* it still has its prefix */
    ok(bn_session_rewind(s, 0));
    CHECK_EQ(bn_session_append_prefix(s, mixed, NULL, 20, BN_LOGITS_LAST, found), BN_ERR_TOKEN);
    CHECK_EQ(bn_session_append_prefix(s, NULL, vectors, 2, BN_LOGITS_LAST, found), BN_ERR_ARGUMENT);
    mixed[19] = VOCAB;
    CHECK_EQ(bn_session_append_prefix(s, mixed, vectors, 20, BN_LOGITS_LAST, found), BN_ERR_TOKEN);
    mixed[19] = -2;
    CHECK_EQ(bn_session_append_prefix(s, mixed, vectors, 20, BN_LOGITS_LAST, found), BN_ERR_TOKEN);
    CHECK_EQ(bn_session_position(s), 0);
    bn_session_free(s);
    end();
}

/* A model without an embedding table. */
static void test_no_table(int headless) {
    float vectors[3 * DIM] = {1, 2, 3}, out[DIM], logits[VOCAB];
    bn_model_info info;
    int32_t token, n;
    kind.input = 1, kind.headless = (uint32_t)headless;
    begin(headless ? BN_MASK_BIDIRECTIONAL : BN_MASK_CAUSAL, 0, 0);
    bn_session *s = session(10, 0, 0);
    ok(bn_model_get_info(model, &info));
    CHECK_EQ(info.has_embedding, 0);
    CHECK_EQ(info.mask, kind.mask);
    CHECK_EQ(bn_session_append(s, text, 1, BN_LOGITS_NONE, NULL), BN_ERR_NO_TABLE);
    CHECK_EQ(bn_session_embed(s, text, 1, BN_POOL_MEAN, out), BN_ERR_NO_TABLE);
    if (headless) {
        CHECK_EQ(bn_session_append_embeddings(s, vectors, 3, BN_LOGITS_LAST, out), BN_ERR_NO_HEAD);
        ok(bn_session_embed_embeddings(s, vectors, 3, BN_POOL_MODEL, out));
    } else {
        CHECK_EQ(bn_session_score(s, text, 1, logits), BN_ERR_NO_TABLE);
        ok(bn_session_append_embeddings(s, vectors, 3, BN_LOGITS_LAST, logits));
        ok(bn_session_sample(s, NULL, &token));
        CHECK_EQ(bn_session_step(s, NULL, NULL, 0, &token, 1, &n), BN_ERR_NO_TABLE);
        CHECK_EQ(append_together(&s, &token, 1), BN_ERR_NO_TABLE);
    }
    bn_session_free(s);
    end();
}

int main(void) {
    for (uint32_t mask = BN_MASK_CAUSAL; mask <= BN_MASK_PREFIX; mask++) {
        test_whole(mask, 0, 0);
        test_whole(mask, 9, 2);
        test_whole(mask, 270, 0);
        test_embeddings(mask);
    }
    test_prefix_is_seen();
    test_rewind_prefix();
    test_bidirectional_refusals();
    test_stopped_pass(BN_MASK_BIDIRECTIONAL);
    test_stopped_pass(BN_MASK_PREFIX);
    test_batch_is_not_stopped();
    test_embed(0);
    test_embed(5);
    test_mixed_prefix();
    test_no_table(0);
    test_no_table(1);
    return 0;
}
