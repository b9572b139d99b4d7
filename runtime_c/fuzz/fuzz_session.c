/* SPDX-License-Identifier: MIT
 *
 * fuzz_session.c: any bytes as a saved session: load, go on, fork, rewind, save again, free.
 *
 *     fuzz_session -max_len=16384 CORPUS/       with libFuzzer (clang -fsanitize=fuzzer)
 *
 * Needs no corpus to begin with: the mutator starts from a session that was saved, and mostly makes
 * its size and checksum right again, since almost nothing lies behind wrong ones.
 */
#define _POSIX_C_SOURCE 200809L
#include "mask_model.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

enum { CRC = 12, SIZE = 16, FIELDS = 24, RECORD = 112 }; /* session/saved.c */

/* Layers that see all and layers with a window, a draft, and a budget that long sessions exceed. */
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    kind.draft = 1;
    begin(BN_MASK_CAUSAL, 20, 2);
    bn_model_close(model);
    const bn_load_options options = {.threads = 1, .cache_bytes = 500000};
    ok(bn_model_open_bytes(file, file_size, &options, &model, NULL));
    return 0;
}

/* What a text does next may have no room, or be no number; it never reads what is not there. */
static void go_on(bn_session *s, uint64_t *random) {
    const bn_sampler warm = {
        .temperature = 1.2f, .top_k = 5, .repeat_penalty = 1.1f, .penalty_window = -1};
    const int32_t draft[] = {1, 2, 3, 4};
    float confidences[4];
    int32_t tokens[4], n, position = bn_session_position(s);
    const int32_t least = bn_session_rewind_least(s);
    CHECK(position >= 0 && position <= bn_session_context(s) && least <= position);
    model->timings = (bn_timings){0}; /* so that guesses are worth it */
    (void)bn_session_step(s, &warm, draft, (int32_t)check_below(random, 2) * 4, tokens, 4, &n);
    (void)bn_session_guess(s, &warm, 1, 4, tokens, confidences, &n);
    (void)bn_session_append(s, text, 1 + (int32_t)check_below(random, 40), BN_LOGITS_LAST, NULL);
    (void)bn_session_sample(s, &warm, tokens);
    if (check_below(random, 4) == 0)
        (void)bn_session_repeat(s, BN_REPEATED + (int32_t)check_below(random, 300));
    position = bn_session_position(s);
    n = (int32_t)check_below(random, (size_t)position + 1);
    CHECK_EQ(bn_session_rewind(s, n),
             n == 0 || n == position || n >= bn_session_rewind_least(s) ? BN_OK : BN_ERR_STATE);
    (void)bn_session_append(s, text, 1, BN_LOGITS_LAST, NULL);
}

/* Both in a pass: one with guesses behind a token, one with a piece of a prompt. */
static void go_on_together(bn_session *a, bn_session *b, uint64_t *random) {
    const int32_t draft[] = {1, 2, 3, 4};
    int32_t chosen[2][4];
    bn_entry entries[] = {{.session = a,
                           .tokens = text,
                           .n_tokens = 1,
                           .most = 4,
                           .draft = draft,
                           .n_draft = (int32_t)check_below(random, 2) * 4,
                           .chosen = chosen[0]},
                          {.session = b,
                           .tokens = text,
                           .n_tokens = 1 + (int32_t)check_below(random, 40),
                           .most = (int32_t)check_below(random, 4),
                           .chosen = chosen[1]}};
    model->timings = (bn_timings){0}; /* so that guesses are worth it */
    (void)bn_step_batch(entries, 2);
    for (int i = 0; i < 2; i++)
        CHECK(entries[i].n_chosen >= 0 && entries[i].n_chosen <= entries[i].most &&
              (entries[i].status || entries[i].n_chosen > 0 || entries[i].most == 0));
}

/* What came from bytes goes into others, from which the same comes. */
static void save_again(const bn_session *s) {
    const uint64_t size = bn_session_saved_size(s, 0);
    uint8_t *bytes = malloc((size_t)size);
    bn_session *back;
    CHECK(bytes != NULL);
    ok(bn_session_save(s, NULL, 0, bytes, size));
    const bn_status status = bn_session_load(model, bytes, size, &back, NULL, NULL, NULL);
    if (status != BN_ERR_CACHE) {
        ok(status);
        CHECK_EQ(bn_session_saved_size(back, 0), size);
        bn_session_free(back);
    }
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t *bytes = tiny_copy(data, size); /* of exactly this size */
    uint64_t random = size, note_size = 0;
    char why[BN_DETAIL_SIZE] = "";
    const uint8_t *note = NULL;
    bn_session *s = NULL, *copy;
    const bn_status status = bn_session_load(model, bytes, size, &s, &note, &note_size, why);
    CHECK((status == BN_OK) == (s != NULL) && (status == BN_OK) == (why[0] == '\0'));
    if (s) {
        CHECK(note == bytes + RECORD && note_size <= size - RECORD);
        save_again(s);
        ok(bn_session_fork(s, &copy));
        go_on_together(s, copy, &random);
        go_on(s, &random);
        bn_session_free(s);
        go_on(copy, &random);
        bn_session_free(copy);
    }
    free(bytes);
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    return 0;
}

/* A session of any type and some tokens, as bytes. */
static size_t good(uint8_t *data, size_t max_size, uint64_t *random) {
    const bn_session_options options = {.kv_type = (int32_t)check_below(random, BN_KV_TYPES),
                                        .n_ctx = check_below(random, 32) ? 40 : 300,
                                        .batch = 1 + (int32_t)check_below(random, 40)};
    const int32_t n = (int32_t)check_below(random, 15);
    bn_session *s;
    ok(bn_session_new(model, &options, &s));
    if (options.n_ctx > 256) { /* layers with a window forget what is behind so many */
        ok(bn_session_append(s, text, 290, BN_LOGITS_LAST, NULL));
        ok(bn_session_rewind(s, check_below(random, 2) ? 0 : bn_session_rewind_least(s)));
    }
    if (n > 0)
        ok(bn_session_append(s, text, n, n % 2 ? BN_LOGITS_LAST : BN_LOGITS_NONE, NULL));
    const uint64_t size = bn_session_saved_size(s, 5);
    if (size <= max_size)
        ok(bn_session_save(s, "note", 5, data, size));
    bn_session_free(s);
    return size <= max_size ? (size_t)size : 0;
}

/* One number of the record to a value that programs get wrong, or one beside what it was. */
static void set_field(uint8_t *data, uint64_t *random) {
    static const uint32_t values[] = {0, 1, 19, 64, 255, 256, 299, 300, 0x7FFFFFFF, 0xFFFFFFFF};
    const size_t at = FIELDS + check_below(random, (RECORD - FIELDS) / 4) * 4;
    const uint64_t value = check_below(random, 2)
                               ? values[check_below(random, sizeof values / sizeof *values)]
                               : tiny_get(data + at, 4) + (check_below(random, 2) ? 1 : UINT32_MAX);
    tiny_put(data + at, value, 4);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint64_t random = seed;
    if (size < RECORD || check_below(&random, 8) == 0)
        size = good(data, max_size, &random);
    if (size >= RECORD && check_below(&random, 2))
        set_field(data, &random);
    else
        size = LLVMFuzzerMutate(data, size, max_size);
    if (size >= RECORD && check_below(&random, 16)) {
        bn_kernels scalar;
        bn_kernels_scalar(&scalar);
        tiny_put(data + SIZE, size, 8);
        tiny_put(data + CRC, scalar.bytes.crc32(0, data + SIZE, size - SIZE), 4);
    }
    return size;
}
