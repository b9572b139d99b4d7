/* SPDX-License-Identifier: MIT
 *
 * test_retries.c: a call that failed for lack of something can be repeated. A program that appends,
 * forks, saves, loads, steps, scores, embeds and repeats is run with its first system call failing
 * (failing.h), then the second, ... until none is left. It repeats the call that fails, and all its
 * numbers are as without a failure.
 */
#define _GNU_SOURCE
#include "failing.h"
#include "mask_model.h"

enum { TEXTS = 3, ROUNDS = 3, NUMBERS = 2 * TEXTS * VOCAB };

static char path[] = "/tmp/bitnet_retries_XXXXXX"; /* of an adapter */
static int32_t type;                               /* of the cache */
static float numbers[NUMBERS];
static size_t n_numbers;

/* A call for which at most one thing is missing. */
#define AGAIN(call)                                                                                \
    do {                                                                                           \
        bn_status status_ = (call);                                                                \
        if (status_) {                                                                             \
            CHECK_EQ(status_, injected);                                                           \
            injected = BN_OK;                                                                      \
            status_ = (call);                                                                      \
        }                                                                                          \
        CHECK_MSG(status_ == BN_OK, "%s: %s", #call, bn_status_text(status_));                     \
    } while (0)

static void keep(const float *x, size_t n) {
    CHECK(x != NULL && n_numbers + n <= NUMBERS);
    memcpy(numbers + n_numbers, x, n * sizeof *x);
    n_numbers += n;
}

/* Tokens of all texts in one pass, which may fail for some of them. */
static void step_together(bn_session *const *all) {
    bn_entry entries[TEXTS];
    int32_t chosen[TEXTS];
    for (int32_t i = 0; i < TEXTS; i++)
        entries[i] = (bn_entry){
            .session = all[i], .tokens = text, .n_tokens = 1 + i, .most = 1, .chosen = &chosen[i]};
    const bn_status status = bn_step_batch(entries, TEXTS);
    CHECK_EQ(status, injected);
    for (int32_t i = 0; i < TEXTS; i++)
        if (entries[i].status)
            ok(bn_step_batch(&entries[i], 1));
    injected = BN_OK;
}

static void save_and_load(const bn_session *s, bn_session **back) {
    static uint8_t bytes[1 << 20];
    const uint64_t size = bn_session_saved_size(s, 0);
    CHECK(size <= sizeof bytes);
    ok(bn_session_save(s, NULL, 0, bytes, size));
    AGAIN(bn_session_load(model, bytes, size, back, NULL, NULL, NULL));
}

/* Tokens until the text has `end` of them; how many a step gives depends on the machine. */
static void step_to(bn_session *s, int32_t end) {
    int32_t tokens[8], n;
    while (bn_session_position(s) < end)
        AGAIN(bn_session_step(s, NULL, text, 3, tokens, end - bn_session_position(s), &n));
}

static void use_sessions(bn_session *const *all) {
    const int32_t *const pieces[TEXTS] = {text, text + 30, text + 7}, sizes[TEXTS] = {70, 9, 1};
    float scores[5], vectors[TEXTS * DIM];
    for (int round = 0; round < ROUNDS; round++)
        step_together(all);
    step_to(all[1], 80);
    AGAIN(bn_session_score(all[2], text, 5, scores));
    for (int i = 0; i < TEXTS; i++)
        keep(bn_session_logits(all[i]), VOCAB);
    for (int i = 0; i < TEXTS; i++)
        ok(bn_session_rewind(all[i], 0));
    AGAIN(bn_embed_batch(all, pieces, sizes, TEXTS, BN_POOL_MEAN, vectors));
    keep(vectors, sizeof vectors / sizeof *vectors);
    AGAIN(bn_session_repeat(all[0], TEXT));
}

static void use_engine(void) {
    const char *const adapters[] = {path};
    const bn_load_options options = {.threads = 3, .n_adapters = 1, .adapters = adapters};
    const bn_session_options o = {.batch = 24, .kv_type = type, .adapter = 1};
    const bn_session_options larger = {.batch = 30, .kv_type = type};
    bn_session *all[TEXTS], *other;
    n_numbers = 0;
    AGAIN(bn_model_open_bytes(file, file_size, &options, &model, NULL));
    AGAIN(bn_session_new(model, &o, &all[0]));
    AGAIN(bn_session_append(all[0], text, 70, BN_LOGITS_LAST, NULL));
    AGAIN(bn_session_fork(all[0], &all[1]));
    save_and_load(all[0], &all[2]);
    AGAIN(bn_session_new(model, &larger, &other)); /* all get a larger workspace */
    bn_session_free(other);
    use_sessions(all);
    for (int i = 0; i < TEXTS; i++)
        bn_session_free(all[i]);
    CHECK(model->work == NULL); /* the last session gives it back */
    bn_model_close(model);
}

static void test_retries(void) {
    static float expected[NUMBERS];
    const long before = held;
    use_engine();
    memcpy(expected, numbers, sizeof expected);
    long n = 0;
    for (int none_left = 0; !none_left; n++) {
        calls_until_failure = n;
        use_engine();
        none_left = calls_until_failure >= 0;
        calls_until_failure = -1;
        CHECK_MSG(held == before, "failure %ld leaves %ld things held", n, (long)held - before);
        CHECK_MSG(memcmp(numbers, expected, sizeof expected) == 0, "failure %ld is seen", n);
    }
    CHECK_MSG(n > 20, "only %ld calls could fail: is the engine linked with --wrap?", n);
}

/* The draft has a window as well, and texts share memory. */
int main(void) {
    size_t size;
    kind.draft = 1;
    begin(BN_MASK_CAUSAL, 20, 2);
    bn_model_close(model);
    kind.rank = 3;
    uint8_t *adapter = tiny_adapter(recipe, file, 1, &size);
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, adapter, size) == (ssize_t)size && close(fd) == 0);
    for (type = 0; type < BN_KV_TYPES; type++)
        test_retries();
    CHECK_EQ(unlink(path), 0);
    free(adapter);
    free(file);
    return 0;
}
