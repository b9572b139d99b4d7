/* SPDX-License-Identifier: MIT
 *
 * test_draft.c: which drafts the engine refuses, with its explanation, what a draft and the text
 * stack before it take from each other, and guesses that cannot be made.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "draft.h"
#include "mask_model.h"

static bn_kernels kernels;
static bn_file parsed; /* its tables are a copy, which may be changed after the checks */
static bn_stack stack; /* of text */

static void parse(void) {
    CHECK_EQ(bn_file_parse(file, file_size, &kernels, &parsed, NULL), BN_OK);
    CHECK_EQ(bn_stack_open(&parsed, 0, &kernels, &stack), BN_OK);
}

static void finish(void) {
    bn_stack_close(&stack);
    bn_file_close(&parsed);
}

static void refused(bn_status expected, const char *says) {
    char why[BN_DETAIL_SIZE] = "";
    const bn_status status = bn_draft_open(&parsed, 1, &kernels, &stack, why);
    CHECK_MSG(status == expected && strstr(why, says), "%d: \"%s\", expected \"%s\"", (int)status,
              why, says);
    CHECK(stack.draft == NULL);
    finish();
}

static void test_refusals(void) {
    static const struct {
        unsigned word; /* of the draft's record */
        uint32_t value;
        bn_status status;
        const char *says;
    } wrong[] = {
        {1, BN_MASK_BIDIRECTIONAL, BN_ERR_UNSUPPORTED, "mask of a draft 1"},
        {3, DIM + 1, BN_ERR_CONFIG, "41 and max_context 700, expected 40 and 700"},
        {5, HEADS + 2, BN_ERR_UNSUPPORTED, "n_heads of a draft 6"},
        {6, 1, BN_ERR_UNSUPPORTED, "n_kv_heads of a draft 1"},
        {7, HEAD + 1, BN_ERR_UNSUPPORTED, "head_dim of a draft 13"},
        {8, FFN + 1, BN_ERR_UNSUPPORTED, "ffn_dim of a draft 51"},
        {9, TEXT / 2, BN_ERR_CONFIG, "max_context 350, expected 40 and 700"},
        {10, 30, BN_ERR_UNSUPPORTED, "sliding_window of a draft 30"},
        {12, 128, BN_ERR_CONFIG, "an embedding_norm"},
        {14, 1, BN_ERR_UNSUPPORTED, "ffn of a draft 1"},
        {16, 2, BN_ERR_UNSUPPORTED, "n_experts of a draft 2"},
        {17, 1, BN_ERR_UNSUPPORTED, "experts_per_token of a draft 1"},
        {18, BN_POSITION_LEARNED, BN_ERR_CONFIG, "a position table"},
        {18, BN_POSITION_SINUSOIDAL, BN_ERR_CONFIG, "a position table"},
        {21, 1, BN_ERR_CONFIG, "a head"},
        {27, BN_POOL_MEAN, BN_ERR_CONFIG, "a pooling or a projector"},
        {28, 1, BN_ERR_CONFIG, "a head"},
        {29, HEAD - 2, BN_ERR_UNSUPPORTED, "rope_dim of a draft 10"},
        {43, 7, BN_ERR_CONFIG, "a pooling or a projector"},
        {47, 1 | 1 << 16, BN_ERR_UNSUPPORTED, "adapters of a draft 65537"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        parse();
        tiny_put((uint8_t *)parsed.tables + 256 + 4 * wrong[i].word, wrong[i].value, 4);
        refused(wrong[i].status, wrong[i].says);
    }
    char why[BN_DETAIL_SIZE] = "";
    bn_model *none;
    uint8_t *forged = tiny_copy(file, file_size);
    tiny_put(forged + tiny_section(forged, 1) + 256 + 4 * 9, TEXT / 2, 4);
    tiny_fix_checksums(forged, file_size);
    CHECK_EQ(bn_model_open_bytes(forged, file_size, NULL, &none, why), BN_ERR_CONFIG);
    CHECK_MSG(strstr(why, "max_context 350"), "%s", why);
    free(forged);
    parse();
    memcpy((uint8_t *)parsed.tables + 256 + 192, stack.config.name, sizeof stack.config.name);
    refused(BN_ERR_CONFIG, "the same name");
    parse();
    stack.config.has_head = 0;
    refused(BN_ERR_CONFIG, "no tokens or no head");
    parse();
    stack.config.mask = BN_MASK_PREFIX;
    refused(BN_ERR_UNSUPPORTED, "a draft has mask 2");
}

/* Both share a workspace and a cache, and the draft uses the head of the text stack. */
static void test_sharing(void) {
    parse();
    for (size_t i = 0; i < parsed.n_tensors; i++)
        if (parsed.tensors[i].stack == 1 && parsed.tensors[i].role == BN_Q)
            ((uint8_t *)parsed.tables)[parsed.n_stacks * 256 + i * 64 + 10] = BN_SCALE_GROUP;
    stack.config.logit_softcap = 5;
    CHECK_EQ(stack.grouped, 0);
    CHECK_EQ(bn_draft_open(&parsed, 1, &kernels, &stack, NULL), BN_OK);
    CHECK(stack.grouped == 1 && stack.draft->grouped == 1);
    CHECK(stack.draft->layers->place == LAYERS && stack.cached[0] == LAYERS + 1);
    CHECK(stack.draft->head.data == stack.head.data && stack.draft->head.data != NULL);
    CHECK(stack.draft->config.vocab_size == VOCAB && stack.draft->config.logit_softcap == 5);
    finish();
}

/* No token may be guessed, or there is no memory for the keys of guesses. */
static void test_no_guess(void) {
    static const uint32_t allowed[(VOCAB + 31) / 32] = {0};
    const bn_sampler none = {.allowed = allowed};
    bn_model_info info;
    int32_t guesses[4], n;
    float confidences[4];
    ok(bn_model_get_info(model, &info));
    const uint64_t block = BN_BLOCK_KEYS * info.kv_bytes_per_token[BN_KV_F16];
    bn_model_close(model);
    const bn_load_options options = {.threads = 1, .cache_bytes = block};
    ok(bn_model_open_bytes(file, file_size, &options, &model, NULL));
    bn_session *s = session(TEXT, 0, BN_KV_F16);
    ok(bn_session_append(s, text, BN_BLOCK_KEYS - 5, BN_LOGITS_LAST, NULL));
    ok(bn_session_guess(s, NULL, 7, 4, guesses, confidences, &n));
    CHECK_EQ(n, 4);
    ok(bn_session_guess(s, &none, 7, 4, guesses, confidences, &n));
    CHECK_EQ(n, 0);
    n = 77;
    ok(bn_session_append(s, text, 5, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_session_guess(s, NULL, 7, 4, guesses, confidences, &n), BN_ERR_CACHE);
    CHECK_EQ(n, 77);
    bn_session_free(s);
}

/* A guess depends on the token that it comes after. */
static void test_after_a_token(void) {
    int32_t guesses[4], n;
    float confidences[2][4];
    bn_session *s = session(TEXT, 0, BN_KV_F16);
    ok(bn_session_append(s, text, 20, BN_LOGITS_LAST, NULL));
    for (int32_t i = 0; i < 2; i++)
        ok(bn_session_guess(s, NULL, 7 + i, 4, guesses, confidences[i], &n));
    CHECK(confidences[0][0] != confidences[1][0]);
    bn_session_free(s);
}

/* `allowed` has a row for the first token only, so none is guessed beyond it. */
static void test_allowed(void) {
    enum { MOST = 8, STEPS = 10 };
    uint32_t all[MOST * ((VOCAB + 31) / 32)];
    int32_t token = 7, chosen[MOST], n[2] = {0};
    memset(all, 0xff, sizeof all);
    for (int with = 0; with < 2; with++) {
        const bn_sampler s = {.temperature = 5000, .top_p = 0.99f, .allowed = with ? all : NULL};
        bn_entry e = {.session = session(TEXT, 0, BN_KV_F16),
                      .tokens = &token,
                      .n_tokens = 1,
                      .most = MOST,
                      .sampler = &s,
                      .chosen = chosen};
        ok(bn_session_append(e.session, text, 200, BN_LOGITS_LAST, NULL));
        for (int step = 0; step < STEPS; step++, n[with] += e.n_chosen) {
            model->timings = (bn_timings){0}; /* so that guesses are worth it */
            ok(bn_step_batch(&e, 1));
            token = chosen[e.n_chosen - 1];
        }
        bn_session_free(e.session);
    }
    CHECK_MSG(n[0] > STEPS && n[1] == STEPS, "%d and %d tokens", n[0], n[1]);
}

/* A draft follows a text that was made longer: the keys of its layers were copied, too. */
static void test_repeated(void) {
    int32_t guesses[4], n;
    float confidences[4];
    bn_session *s = session(TEXT, 0, BN_KV_F16);
    ok(bn_session_append(s, text, 2 * BN_REPEATED, BN_LOGITS_LAST, NULL));
    ok(bn_session_repeat(s, TEXT - 10));
    ok(bn_session_append(s, text, 1, BN_LOGITS_LAST, NULL));
    ok(bn_session_guess(s, NULL, 7, 4, guesses, confidences, &n));
    CHECK_EQ(n, 4);
    bn_session_free(s);
}

int main(void) {
    bn_kernels_scalar(&kernels);
    kind.draft = 1;
    begin(BN_MASK_CAUSAL, 0, 0);
    test_refusals();
    test_sharing();
    test_after_a_token();
    test_allowed();
    test_repeated();
    test_no_guess();
    end();
    return 0;
}
