/* SPDX-License-Identifier: MIT
 *
 * test_attention.c: how attention cuts its work into blocks of rows, with one query for each key
 * and value or many, does not change a bit.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "session/session.h"
#include "tiny_file.h"
#include "together.h"

enum { DIM = 24, HEAD = 4, FFN = 20, VOCAB = 31, CONTEXT = 300, LAYERS = 2 };

static uint32_t heads, kv_heads; /* of the next model */
static int32_t text[CONTEXT];

static void recipe(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1);
    uint32_t words[48] = {0, 0, VOCAB, DIM, LAYERS, heads, kv_heads, HEAD, FFN, CONTEXT};
    words[12] = 1 | TINY_FINAL_NORM;
    words[13] = tiny_float_bits(1e-5f);
    words[14] = words[21] = words[28] = 1;
    words[19] = words[22] = words[23] = words[24] = one;
    words[29] = HEAD;
    tiny_stack(w, words, "heads");
    for (unsigned l = 0; l < LAYERS; l++) {
        tiny_tensor(w, l, 1, TINY_NONE, 0, 1, 0, 1, DIM);
        tiny_tensor(w, l, 2, TINY_NONE, 0, 4, 1, heads * HEAD, DIM);
        tiny_tensor(w, l, 3, TINY_NONE, 0, 4, 1, kv_heads * HEAD, DIM);
        tiny_tensor(w, l, 4, TINY_NONE, 0, 4, 1, kv_heads * HEAD, DIM);
        tiny_tensor(w, l, 8, TINY_NONE, 0, 4, 1, DIM, heads * HEAD);
        tiny_tensor(w, l, 10, TINY_NONE, 0, 1, 0, 1, DIM);
        tiny_tensor(w, l, 13, TINY_NONE, 0, 4, 1, FFN, DIM);
        tiny_tensor(w, l, 15, TINY_NONE, 0, 4, 1, DIM, FFN);
    }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, VOCAB, DIM);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, HEAD / 2);
}

static void ok(bn_status status) {
    CHECK_MSG(status == BN_OK, "%s", bn_status_text(status));
}

static bn_model *opened(const uint8_t *file, size_t size, int32_t threads) {
    const bn_load_options options = {.threads = threads};
    char why[BN_DETAIL_SIZE] = "";
    bn_model *model;
    const bn_status status = bn_model_open_bytes(file, size, &options, &model, why);
    CHECK_MSG(status == BN_OK, "%s", why);
    return model;
}

static bn_session *session(bn_model *model) {
    bn_session *s;
    ok(bn_session_new(model, NULL, &s));
    return s;
}

/* With several threads, each takes a piece of the prompt, of which the last may be short. */
static void test_pieces(uint32_t all, uint32_t of_keys) {
    static float expected[CONTEXT][VOCAB], logits[CONTEXT][VOCAB];
    const int32_t lengths[] = {40, 129, CONTEXT};
    size_t size;
    heads = all, kv_heads = of_keys;
    uint8_t *file = tiny_file(recipe, SIZE_MAX, SIZE_MAX, &size);
    bn_model *model = opened(file, size, 1);
    bn_session *s = session(model);
    for (int i = 0; i < CONTEXT; i++)
        ok(bn_session_append(s, text + i, 1, BN_LOGITS_ALL, expected[i]));
    bn_session_free(s);
    bn_model_close(model);
    for (int32_t threads = 1; threads <= 3; threads++) {
        model = opened(file, size, threads);
        s = session(model);
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            ok(bn_session_rewind(s, 0));
            ok(bn_session_append(s, text, lengths[i], BN_LOGITS_ALL, logits[0]));
            CHECK_MSG(memcmp(logits, expected, (size_t)lengths[i] * sizeof *logits) == 0,
                      "%u heads, %d threads, %d tokens", all, threads, lengths[i]);
        }
        bn_session_free(s);
        bn_model_close(model);
    }
    free(file);
}

/* Texts with the next token of each in a pass, at positions that follow each other as those of one
 * text do. */
static void test_neighbours(void) {
    enum { N = 5, FIRST = 20 };
    bn_session *s[N], *alone[N];
    size_t size;
    heads = kv_heads = 2;
    uint8_t *file = tiny_file(recipe, SIZE_MAX, SIZE_MAX, &size);
    bn_model *model = opened(file, size, 2);
    for (int32_t i = 0; i < N; i++) {
        s[i] = session(model);
        ok(bn_session_append(s[i], text + i, FIRST + i, BN_LOGITS_NONE, NULL));
        ok(bn_session_fork(s[i], &alone[i]));
        ok(bn_session_append(alone[i], text + i, 1, BN_LOGITS_LAST, NULL));
    }
    ok(append_together(s, text, N));
    for (int i = 0; i < N; i++) {
        const float *x = bn_session_logits(s[i]), *y = bn_session_logits(alone[i]);
        CHECK(x != NULL && y != NULL);
        CHECK_MSG(memcmp(x, y, VOCAB * sizeof *x) == 0, "text %d", i);
        bn_session_free(s[i]);
        bn_session_free(alone[i]);
    }
    bn_model_close(model);
    free(file);
}

int main(void) {
    uint64_t random = 3;
    for (int i = 0; i < CONTEXT; i++)
        text[i] = (int32_t)check_below(&random, VOCAB);
    test_pieces(2, 2);
    test_pieces(40, 1);
    test_pieces(66, 2);
    test_neighbours();
    return 0;
}
