/* SPDX-License-Identifier: MIT
 *
 * test_unverified.c: no_verify skips the look at the weights, not safety. With any bytes at all
 * in DATA every tier computes something, chooses a token of the vocabulary or says BN_ERR_NUMERIC,
 * and never reads or writes out of bounds. Run it under AddressSanitizer and UBSan.
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

/* Now and then one word of a valid file is absurd. */
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
        bn_model_close(model);
    }
}

int main(void) {
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
    uint8_t *good = tiny_file(tiny_decoder, SIZE_MAX, SIZE_MAX, &size);
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
    return 0;
}
