/* SPDX-License-Identifier: MIT
 *
 * test_unverified.c: no_verify skips checks of the weights, not safety. With any bytes in DATA
 * every tier computes something, chooses a token of the vocabulary or returns BN_ERR_NUMERIC, and
 * never reads or writes out of bounds. Run it under AddressSanitizer and UBSan.
 */
#define _POSIX_C_SOURCE 200809L
#include "bitnet_runtime.h"
#include "tiny_file.h"

enum { VOCAB = 19, CONTEXT = 32 };

typedef void (*fill)(uint8_t *data, size_t size, uint64_t seed);

static void fill_words(uint8_t *data, size_t size, uint64_t value) {
    for (size_t i = 0; i + 4 <= size; i += 4)
        tiny_put(data + i, value, 4);
}

static void fill_random(uint8_t *data, size_t size, uint64_t seed) {
    for (size_t i = 0; i < size; i++)
        data[i] = (uint8_t)check_random(&seed);
}

/* Occasionally one word of a valid file is absurd. */
static void fill_sparse(uint8_t *data, size_t size, uint64_t seed) {
    static const uint32_t absurd[] = {0x7FC00000, 0x7F800000, 0xFF800000, 0x7E967699,
                                      0xFE967699, 0x00000001, 0x80000000, 0xFFFFFFFF};
    for (size_t n = 1 + check_below(&seed, 8); n > 0; n--)
        tiny_put(data + 4 * check_below(&seed, size / 4), absurd[check_below(&seed, 8)], 4);
}

static void numeric_or_ok(bn_status status) {
    CHECK_MSG(status == BN_OK || status == BN_ERR_NUMERIC || status == BN_ERR_STATE, "status %d",
              status);
}

/* Encode images, if the model has a vision stack. */
static void look(const bn_model *model) {
    static float pixels[2 * 128], out[2 * 5 * 24];
    const bn_status status = bn_image_encode(model, pixels, 2, out, NULL);
    CHECK(status == BN_OK || status == BN_ERR_NUMERIC || status == BN_ERR_INPUT);
    if (status != BN_ERR_INPUT)
        numeric_or_ok(bn_image_embed(model, pixels, 2, out, NULL));
}

static void use(bn_model *model, int32_t kv_type) {
    const bn_session_options options = {.kv_type = kv_type, .batch = 5};
    const bn_sampler sampler = {
        .temperature = 0.8f, .top_k = 7, .top_p = 0.9f, .min_p = 0.01f, .repeat_penalty = 1.2f};
    static float logits[CONTEXT * VOCAB];
    int32_t tokens[CONTEXT], token = -1;
    bn_session *s;
    CHECK_EQ(bn_session_new(model, &options, &s), BN_OK);
    for (int32_t i = 0; i < CONTEXT; i++)
        tokens[i] = i % VOCAB;
    bn_status status = bn_session_append(s, tokens, 20, BN_LOGITS_ALL, logits);
    numeric_or_ok(status);
    for (int32_t i = 0; i < 4; i++) {
        status = bn_session_sample(s, i % 2 ? &sampler : NULL, &token);
        numeric_or_ok(status);
        CHECK(status != BN_OK || (token >= 0 && token < VOCAB));
        numeric_or_ok(bn_session_append(s, tokens, 1, BN_LOGITS_LAST, NULL));
    }
    CHECK_EQ(bn_session_rewind(s, 0), BN_OK);
    numeric_or_ok(bn_session_score(s, tokens, CONTEXT, logits));
    bn_session_free(s);
}

static void use_on_all_tiers(const uint8_t *bytes, size_t size) {
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++) {
        const bn_load_options options = {
            .threads = 1 + i % 2, .no_verify = 1, .isa = bn_isa_name(i)};
        char detail[BN_DETAIL_SIZE] = "";
        bn_model *model;
        CHECK_MSG(bn_model_open_bytes(bytes, size, &options, &model, detail) == BN_OK, "%s",
                  detail);
        use(model, i % 3);
        look(model);
        bn_model_close(model);
    }
}

/* --- NaN is always reported --- */

static uint32_t activation;

/* A decoder with as few norms as possible, as norms would detect NaN by themselves. */
static void plain(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[2] = 19,   [3] = 24,          [4] = 1,
                                [5] = 2,    [6] = 1,           [7] = 8,
                                [8] = 20,   [9] = 32,          [12] = TINY_FINAL_NORM,
                                [13] = one, [14] = 0,          [20] = 7,
                                [19] = one, [22] = one,        [23] = one,
                                [24] = one, [15] = activation, [28] = 1,
                                [29] = 8};
    tiny_stack(w, words, "plain");
    tiny_with_bias(w, 0, 2, TINY_NONE, 4, 1, 16, 24);
    tiny_with_bias(w, 0, 3, TINY_NONE, 4, 2, 8, 24);
    tiny_with_bias(w, 0, 4, TINY_NONE, 4, 3, 8, 24);
    tiny_with_bias(w, 0, 8, TINY_NONE, 1, 0, 24, 16);
    tiny_with_bias(w, 0, 12, TINY_NONE, 2, 0, 20, 24);
    tiny_with_bias(w, 0, 13, TINY_NONE, 5, 1, 20, 24);
    tiny_with_bias(w, 0, 15, TINY_NONE, 4, 1, 24, 20);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 19, 24);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 24);
    tiny_tensor(w, TINY_NONE, 67, TINY_NONE, 0, 6, 2, 19, 24);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, 4);
}

/* Set all floats of one tensor, weights or scales, to NaN. */
static void poison(uint8_t *bytes, const uint8_t *record) {
    uint8_t *data = bytes + tiny_section(bytes, 6);
    const int half = record[9] == 2 || record[10] == 3, scaled = record[10] != 0;
    const size_t at = (size_t)tiny_get(record + (scaled ? 40 : 24), 8);
    const size_t size = (size_t)tiny_get(record + (scaled ? 48 : 32), 8);
    for (size_t i = 0; i < size; i += 4)
        tiny_put(data + at + i, half ? 0x7E007E00 : 0x7FC00000, half && size - i < 4 ? 2 : 4);
}

static void expect_numeric(const uint8_t *bytes, size_t size, size_t tensor) {
    const int32_t tokens[] = {3, 1, 4, 1, 5};
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++) {
        const bn_load_options options = {.threads = 1, .no_verify = 1, .isa = bn_isa_name(i)};
        bn_model *model;
        CHECK_EQ(bn_model_open_bytes(bytes, size, &options, &model, NULL), BN_OK);
        for (int32_t type = 0; type < BN_KV_TYPES; type++) {
            const bn_session_options o = {.kv_type = type};
            int32_t token;
            float scores[5];
            bn_session *s;
            CHECK_EQ(bn_session_new(model, &o, &s), BN_OK);
            bn_status status = bn_session_append(s, tokens, 5, BN_LOGITS_LAST, NULL);
            if (status == BN_OK) {
                CHECK_EQ(bn_session_score(s, tokens, 1, scores), BN_ERR_NUMERIC);
                status = bn_session_sample(s, NULL, &token);
            }
            CHECK_MSG(status == BN_ERR_NUMERIC, "%s, cache %d, activation %u, tensor %zu: %d",
                      options.isa, type, activation, tensor, status);
            CHECK_EQ(bn_session_rewind(s, 0), BN_OK);
            CHECK_EQ(bn_session_score(s, tokens, 5, scores), BN_ERR_NUMERIC);
            bn_session_free(s);
        }
        bn_model_close(model);
    }
}

/* Poison each tensor in turn. */
static void test_nan(void (*recipe)(tiny_writer *)) {
    size_t size;
    uint8_t *good = tiny_file(recipe, SIZE_MAX, SIZE_MAX, &size);
    const size_t tensors = tiny_section(good, 2);
    const size_t n = (size_t)tiny_get(good + tiny_entry(good, 2) + 16, 8) / 64;
    for (size_t i = 0; i < n; i++) {
        uint8_t *bytes = tiny_copy(good, size);
        poison(bytes, bytes + tensors + 64 * i);
        expect_numeric(bytes, size, i);
        free(bytes);
    }
    free(good);
}

/* The same for tensors that only images use. */
static void test_blind(void) {
    static float pixels[128], out[5 * 24];
    size_t size;
    uint8_t *good = tiny_file(tiny_seeing, SIZE_MAX, SIZE_MAX, &size);
    const size_t tensors = tiny_section(good, 2);
    const size_t n = (size_t)tiny_get(good + tiny_entry(good, 2) + 16, 8) / 64;
    for (size_t i = 0; i < n; i++) {
        uint8_t *bytes = tiny_copy(good, size), *record = bytes + tensors + 64 * i;
        const bn_load_options options = {.threads = 1, .no_verify = 1};
        bn_model *model;
        poison(bytes, record);
        CHECK_EQ(bn_model_open_bytes(bytes, size, &options, &model, NULL), BN_OK);
        if (tiny_get(record, 2) == 1) {
            CHECK_EQ(bn_image_embed(model, pixels, 1, out, NULL), BN_ERR_NUMERIC);
            if (tiny_get(record + 4, 2) < 80)
                CHECK_EQ(bn_image_encode(model, pixels, 1, out, NULL), BN_ERR_NUMERIC);
        }
        bn_model_close(model);
        free(bytes);
    }
    free(good);
}

/* Router outputs that are not finite are detected, although no norm or quantizer follows. */
static void test_router(void) {
    size_t size;
    uint8_t *bytes = tiny_file(tiny_mixture, SIZE_MAX, SIZE_MAX, &size);
    const uint8_t *record = bytes + tiny_section(bytes, 2);
    size_t number = 0;
    for (; tiny_get(record + 4, 2) != 11; number++)
        record += 64;
    poison(bytes, record);
    expect_numeric(bytes, size, number);
    free(bytes);
}

/* Also in a row of which nothing is wanted, by a model without norms: otherwise the text would keep
 * a key or value that makes all later calls fail. */
static void test_nothing_wanted(void) {
    static const float vectors[2 * 8] = {1, 2, 3};
    const bn_load_options options = {.threads = 1, .no_verify = 1};
    enum { V = 2 }; /* the first tensors are q, k and v */
    size_t size;
    bn_model *model;
    bn_session *s;
    uint8_t *bytes = tiny_file(tiny_bare, SIZE_MAX, SIZE_MAX, &size);
    poison(bytes, bytes + tiny_section(bytes, 2) + 64 * V);
    CHECK_EQ(bn_model_open_bytes(bytes, size, &options, &model, NULL), BN_OK);
    CHECK_EQ(bn_session_new(model, NULL, &s), BN_OK);
    CHECK_EQ(bn_session_append_embeddings(s, vectors, 2, BN_LOGITS_NONE, NULL), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_position(s), 0);
    bn_session_free(s);
    bn_model_close(model);
    free(bytes);
}

static void test_any_bytes(void (*recipe)(tiny_writer *)) {
    static const struct {
        fill fill;
        uint64_t first, last;
    } patterns[] = {{fill_words, 0xFFFFFFFF, 0xFFFFFFFF}, /* code 3 everywhere, NaN */
                    {fill_words, 0, 0},                   /* scales of 0 */
                    {fill_words, 0x7F800000, 0x7F800000}, /* infinity */
                    {fill_words, 0x7E967699, 0x7E967699}, /* 1e38 */
                    {fill_words, 0x00000001, 0x00000001}, /* the smallest subnormal */
                    {fill_random, 1, 10},
                    {fill_sparse, 1, 60}};
    size_t size;
    uint8_t *good = tiny_file(recipe, SIZE_MAX, SIZE_MAX, &size);
    const size_t data = tiny_section(good, 6);
    for (size_t p = 0; p < sizeof patterns / sizeof *patterns; p++)
        for (uint64_t seed = patterns[p].first; seed <= patterns[p].last; seed++) {
            uint8_t *bytes = tiny_copy(good, size);
            patterns[p].fill(bytes + data, (size_t)tiny_get(bytes + tiny_entry(bytes, 6) + 16, 8),
                             seed);
            use_on_all_tiers(bytes, size);
            free(bytes);
        }
    free(good);
}

int main(void) {
    for (activation = 0; activation <= 4; activation++)
        test_nan(plain);
    test_nan(tiny_original);
    test_router();
    test_nothing_wanted();
    test_any_bytes(tiny_decoder);
    test_any_bytes(tiny_mixture);
    test_any_bytes(tiny_original);
    test_any_bytes(tiny_seeing);
    test_blind();
    return 0;
}
