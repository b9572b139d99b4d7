/* SPDX-License-Identifier: MIT
 *
 * fuzz_file.c: any bytes as a packed file: parse, verify, open, compute a few tokens, guess, look
 * at an image, free; as an adapter alone: open beside its model, and compute.
 *
 *     fuzz_file -max_len=16384 CORPUS/       with libFuzzer (clang -fsanitize=fuzzer)
 *     fuzz_file FILE...                      built with -DBN_REPLAY: run these files once
 *
 * Needs no corpus to begin with: the mutator starts from a valid file, and mostly makes the
 * checksums right again, since almost nothing lies behind a wrong one.
 */
#define _GNU_SOURCE /* memfd_create */
#include <sys/mman.h>
#include <unistd.h>

#include "bitnet_runtime.h"
#include "model.h"
#include "tiny_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static void guess(bn_model *model, bn_session *session) {
    int32_t tokens[3], n;
    float confidences[3];
    if (bn_session_append(session, (const int32_t[]){1}, 1, BN_LOGITS_LAST, NULL) == BN_OK) {
        (void)bn_session_guess(session, NULL, 1, 3, tokens, confidences, &n);
        model->timings = (bn_timings){0}; /* so that guesses are worth it */
        (void)bn_session_step(session, NULL, NULL, 0, tokens, 3, &n);
    }
}

static void decode(bn_model *model, int32_t adapter) {
    const bn_session_options options = {.n_ctx = 4, .batch = 3, .adapter = adapter};
    const bn_sampler sampler = {
        .temperature = 1.0f, .top_k = 5, .top_p = 0.9f, .repeat_penalty = 1.1f};
    const int32_t prompt[] = {0, 1, 0};
    bn_session *session = NULL;
    float scores[3];
    int32_t token;
    if (bn_session_new(model, &options, &session) != BN_OK) /* a context of less than four */
        return;
    if (bn_session_append(session, prompt, 3, BN_LOGITS_LAST, NULL) == BN_OK &&
        bn_session_sample(session, &sampler, &token) == BN_OK)
        CHECK_EQ(bn_session_position(session), 3);
    (void)bn_session_rewind(session, 0);
    guess(model, session);
    (void)bn_session_rewind(session, 0);
    (void)bn_session_score(session, prompt, 3, scores);
    (void)bn_session_rewind(session, 0);
    (void)bn_session_embed(session, prompt, 3, BN_POOL_MEAN, NULL);
    bn_session_free(session);
}

/* At an image that is small. */
static void look(const bn_model *model) {
    enum { PIXELS = 4096, FLOATS = 1 << 16 };
    static float pixels[2 * PIXELS], out[2 * FLOATS];
    bn_image_info info;
    if (bn_model_get_image_info(model, &info) == BN_OK &&
        (uint64_t)info.channels * info.image_size * info.image_size <= PIXELS &&
        (uint64_t)info.n_tokens * info.width <= FLOATS) {
        (void)bn_image_encode(model, pixels, 2, out, NULL);
        (void)bn_image_embed(model, pixels, 2, out, NULL);
    }
}

/* Beside the model that tiny_drafting makes: what is an adapter alone may be one of it. */
static void adapt(const uint8_t *bytes, size_t size) {
    static uint8_t *base;
    static size_t base_size;
    char path[64];
    bn_model *model;
    if (!base)
        base = tiny_file(tiny_drafting, SIZE_MAX, SIZE_MAX, &base_size);
    const int fd = memfd_create("adapter", 0);
    CHECK(fd >= 0 && write(fd, bytes, size) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const bn_load_options options = {
        .threads = 1, .no_verify = 1, .n_adapters = 1, .adapters = (const char *const[]){path}};
    if (bn_model_open_bytes(base, base_size, &options, &model, NULL) == BN_OK) {
        decode(model, 1);
        bn_model_close(model);
    }
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const bn_load_options options = {.threads = 1, .no_verify = 1};
    uint8_t *bytes = tiny_copy(data, size); /* aligned, and of exactly this size */
    char detail[BN_DETAIL_SIZE] = "";
    bn_kernels kernels;
    bn_model *model;
    bn_file file;
    bn_kernels_select(&kernels, NULL);
    bn_status status = bn_file_parse(bytes, size, &kernels, &file, detail);
    CHECK((status == BN_OK) == (detail[0] == 0));
    if (status == BN_OK)
        (void)bn_file_verify(&file, &kernels, NULL, detail);
    if (file.adapter_alone)
        adapt(bytes, size);
    bn_file_close(&file);
    if (status == BN_OK && bn_model_open_bytes(bytes, size, &options, &model, detail) == BN_OK) {
        decode(model, 0);
        look(model);
        bn_model_close(model);
    }
    free(bytes);
    return 0;
}

#if defined(BN_REPLAY)
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        CHECK_MSG(f != NULL && fseek(f, 0, SEEK_END) == 0, "%s", argv[i]);
        const long size = ftell(f);
        CHECK_MSG(size >= 0, "%s", argv[i]);
        rewind(f);
        uint8_t *bytes = tiny_alloc((size_t)size);
        CHECK_MSG(fread(bytes, 1, (size_t)size, f) == (size_t)size, "%s", argv[i]);
        fclose(f);
        LLVMFuzzerTestOneInput(bytes, (size_t)size);
        free(bytes);
    }
    return 0;
}
#else
/* One field to a value that programs get wrong. */
static void set_field(uint8_t *data, size_t size, uint64_t *random) {
    static const uint64_t values[] = {0,          1,          63,         64,       65,
                                      0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1u << 24, UINT64_MAX};
    const size_t bytes = (size_t)1 << check_below(random, 4);
    const size_t at = check_below(random, size / bytes) * bytes;
    uint64_t value = values[check_below(random, sizeof values / sizeof *values)];
    if (check_below(random, 2))
        value = tiny_get(data + at, bytes) + (check_below(random, 2) ? 1 : UINT64_MAX);
    tiny_put(data + at, value, bytes);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint64_t random = seed;
    if (size < 64) { /* the empty input of an empty corpus */
        void (*const recipes[])(tiny_writer *) = {tiny_decoder,    tiny_mixture, tiny_original,
                                                  tiny_everything, tiny_seeing,  tiny_drafting};
        size_t n;
        uint8_t *good = tiny_file(recipes[seed % 6], SIZE_MAX, SIZE_MAX, &n);
        if (seed % 12 == 5) { /* its adapters alone */
            uint8_t *model = good;
            good = tiny_adapter(tiny_drafting, model, 7, &n);
            free(model);
        }
        size = n < max_size ? n : max_size;
        memcpy(data, good, size);
        free(good);
    }
    if (check_below(&random, 2))
        set_field(data, size, &random);
    else
        size = LLVMFuzzerMutate(data, size, max_size);
    if (check_below(&random, 16))
        tiny_fix_checksums(data, size);
    return size;
}
#endif
