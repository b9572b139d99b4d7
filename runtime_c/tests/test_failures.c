/* SPDX-License-Identifier: MIT
 *
 * test_failures.c: failures of the system. Everything a program does with the engine is repeated
 * with the first system call failing (failing.h), then the second, ... until none is left: each
 * time the right status is returned, nothing leaks, and the next run works.
 */
#define _GNU_SOURCE
#include "failing.h"
#include "tiny_file.h"
#include "together.h"

/* --- everything a program does --- */

enum { VOCAB = 19, PROMPT = 9 };

static char path[] = "/tmp/bitnet_failures_XXXXXX";
static uint8_t *good;
static size_t good_size;

/* How the engine gets the bytes. */
typedef enum source { MAPPED, READ, IN_MEMORY } source;

static bn_status use_sessions(bn_session *a, bn_session *b, float *logits) {
    const int32_t prompt[PROMPT] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    const bn_sampler sampler = {.temperature = 0.5f, .top_k = 3};
    bn_session *const both[] = {a, b};
    int32_t token, chosen[4], n;
    float scores[PROMPT];
    bn_status status = bn_session_score(b, prompt, PROMPT, scores);
    if (!status)
        status = bn_session_sample(a, &sampler, &token);
    if (!status)
        status = bn_session_step(a, &sampler, prompt, 3, chosen, 3, &n);
    if (!status)
        status = append_together(both, prompt, 2);
    if (!status)
        memcpy(logits, bn_session_logits(a), VOCAB * sizeof *logits);
    return status;
}

static bn_status use_images(const bn_model *model) {
    const float pixels[128] = {0.5f};
    float out[5 * 24];
    const bn_status status = bn_image_encode(model, pixels, 1, out, NULL);
    return status ? status : bn_image_embed(model, pixels, 1, out, NULL);
}

static bn_status use_model(bn_model *model, float *logits) {
    const bn_session_options options = {.n_ctx = 32, .batch = 4};
    const int32_t prompt[PROMPT] = {3, 1, 4, 1, 5, 9, 2, 6, 5};
    bn_session *a = NULL, *b = NULL;
    bn_status status = bn_session_new(model, &options, &a);
    if (!status)
        status = bn_session_append(a, prompt, PROMPT, BN_LOGITS_LAST, NULL);
    if (!status)
        status = bn_session_fork(a, &b);
    if (!status)
        status = use_sessions(a, b, logits);
    if (!status)
        status = use_images(model);
    bn_session_free(a);
    bn_session_free(b);
    return status;
}

static bn_status use_engine(source from, float *logits) {
    const bn_load_options options = {.threads = 3, .no_mmap = from == READ};
    char detail[BN_DETAIL_SIZE];
    bn_model *model = NULL;
    memset(detail, 'x', sizeof detail); /* stale contents, without a terminator */
    bn_status status = from == IN_MEMORY
                           ? bn_model_open_bytes(good, good_size, &options, &model, detail)
                           : bn_model_open(path, &options, &model, detail);
    CHECK(memchr(detail, '\0', sizeof detail) != NULL);
    CHECK_MSG((status == BN_OK) == (model != NULL), "%s", detail);
    CHECK_MSG((status == BN_OK) == (*detail == '\0'), "status %d: \"%s\"", status, detail);
    if (!status)
        status = use_model(model, logits);
    bn_model_close(model);
    return status;
}

/* --- the tests --- */

static void test_each_failure(source from) {
    float expected[VOCAB], logits[VOCAB];
    const long before = held;
    long n = 0;
    CHECK_EQ(use_engine(from, expected), BN_OK);
    CHECK_EQ(held, before);
    for (;; n++) {
        calls_until_failure = n;
        injected = BN_OK;
        const bn_status status = use_engine(from, logits);
        const int none_left = calls_until_failure >= 0;
        calls_until_failure = -1;
        CHECK_MSG(held == before, "failure %ld (status %d) leaves %ld things held", n, status,
                  (long)held - before);
        if (none_left)
            break;
        CHECK_MSG(status == injected, "failure %ld gives status %d, expected %d", n, status,
                  injected);
    }
    CHECK_MSG(n >= 9, "only %ld calls could fail: is the engine linked with --wrap?", n);
    CHECK_EQ(use_engine(from, logits), BN_OK);
    CHECK(memcmp(logits, expected, sizeof logits) == 0);
}

/* Failures before anything is opened: each explains what is wrong, also in the environment. */
static void test_arguments(void) {
    const bn_load_options threads = {.threads = 257}, negative = {.threads = -1},
                          isa = {.isa = "z80"}, nameless = {.isa = ""};
    const struct {
        const char *path;
        const bn_load_options *options;
        const char *environment, *says;
        bn_status status;
    } cases[] = {
        {NULL, NULL, NULL, "path", BN_ERR_ARGUMENT},
        {path, &threads, NULL, "threads is 257, expected 0 (automatic) to 256", BN_ERR_ARGUMENT},
        {path, &negative, NULL, "threads is -1", BN_ERR_ARGUMENT},
        {path, &isa, "scalar", "isa 'z80'", BN_ERR_ARGUMENT},
        {path, &nameless, "scalar", "isa '' is not one this machine runs", BN_ERR_ARGUMENT},
        {path, NULL, "z80", "BITNET_ISA 'z80' is not one this machine runs", BN_ERR_ARGUMENT},
        {"/", NULL, NULL, "a directory", BN_ERR_NOT_REGULAR},
        {"/none/such", NULL, NULL, "stat: ", BN_ERR_IO},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char detail[BN_DETAIL_SIZE] = "of another call";
        bn_model *model = NULL;
        if (cases[i].environment)
            CHECK_EQ(setenv("BITNET_ISA", cases[i].environment, 1), 0);
        const bn_status status = bn_model_open(cases[i].path, cases[i].options, &model, detail);
        CHECK_EQ(status, cases[i].status);
        CHECK_MSG(strstr(detail, cases[i].says), "\"%s\", expected \"%s\"", detail, cases[i].says);
        CHECK_EQ(bn_model_open(cases[i].path, cases[i].options, &model, NULL), cases[i].status);
        CHECK(model == NULL);
        CHECK_EQ(unsetenv("BITNET_ISA"), 0);
    }
    bn_model *model = NULL;
    char detail[BN_DETAIL_SIZE] = "of another call";
    CHECK_EQ(bn_model_open_bytes(good + 1, 64, NULL, &model, detail), BN_ERR_ARGUMENT);
    CHECK_MSG(strstr(detail, "aligned") != NULL, "\"%s\"", detail);
}

static void test_slow_reads(void) {
    float expected[VOCAB], logits[VOCAB];
    CHECK_EQ(use_engine(READ, expected), BN_OK);
    trickle = 1;
    CHECK_EQ(use_engine(READ, logits), BN_OK);
    CHECK_MSG(trickle > 10, "read was called %d times", trickle);
    trickle = 0;
    CHECK(memcmp(logits, expected, sizeof logits) == 0);
}

/* A file that someone shortens while it is read. */
static void test_shrinking(void) {
    const bn_load_options options = {.threads = 1, .no_mmap = 1};
    const long before = held;
    trickle = 1;
    for (long reads = 0; reads < 15; reads += 7) { /* also after the first 4096 bytes */
        char detail[BN_DETAIL_SIZE];
        bn_model *model;
        reads_until_end = reads;
        CHECK_EQ(bn_model_open(path, &options, &model, detail), BN_ERR_TRUNCATED);
        CHECK_EQ(reads_until_end, -1);
        CHECK_MSG(strstr(detail, "the file shrank to "), "\"%s\"", detail);
        CHECK_EQ(held, before);
    }
    trickle = 0;
}

static void test_measurements(void) {
    double rate;
    const long before = held;
    for (long n = 0; n < 3; n++) { /* the pool, its thread, the buffer */
        calls_until_failure = n;
        CHECK_EQ(bn_measure_read_bandwidth(2, 2 << 20, &rate),
                 n == 1 ? BN_ERR_THREAD : BN_ERR_MEMORY);
        CHECK_EQ(calls_until_failure, -1);
        CHECK_EQ(held, before);
    }
    CHECK_EQ(bn_measure_read_bandwidth(2, 2 << 20, &rate), BN_OK);
}

int main(void) {
    const int fd = mkstemp(path);
    good = tiny_file(tiny_seeing, SIZE_MAX, SIZE_MAX, &good_size);
    CHECK(fd >= 0 && write(fd, good, good_size) == (ssize_t)good_size);
    close(fd);
    test_each_failure(MAPPED);
    test_each_failure(READ);
    test_each_failure(IN_MEMORY);
    test_arguments();
    test_slow_reads();
    test_shrinking();
    test_measurements();
    CHECK_EQ(unlink(path), 0);
    free(good);
    return 0;
}
