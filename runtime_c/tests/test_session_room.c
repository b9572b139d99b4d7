/* SPDX-License-Identifier: MIT
 *
 * test_session_room.c: what a session takes, and what it may outlive: memory as reported and used,
 * room for a batch, a closed model, a forked process.
 */
#define _GNU_SOURCE /* posix_memalign, mincore */

#include "session/sampler.h"
#include "session/session.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "session_model.h"
#include "together.h"

static bn_model *model;
static int32_t prompt[PROMPT];

/* One KV head for so many queries that a single row fills the room for results of one chunk. */
static void many_heads(tiny_writer *w) {
    enum { D = 16, E = 2, H = 32, F = 16, V = 50 };
    const uint32_t one = tiny_float_bits(1);
    const uint32_t words[48] = {0,
                                0,
                                V,
                                D,
                                1,
                                H,
                                1,
                                E,
                                F,
                                3 * BN_CHUNK_KEYS,
                                [12] = 1 | TINY_FINAL_NORM,
                                [13] = tiny_float_bits(1e-5f),
                                [19] = one,
                                [21] = 1,
                                [22] = one,
                                [23] = one,
                                [24] = one,
                                [28] = 1,
                                [29] = E};
    tiny_stack(w, words, "many_heads");
    tiny_tensor(w, 0, 1, TINY_NONE, 0, 1, 0, 1, D);
    tiny_tensor(w, 0, 2, TINY_NONE, 0, 4, 1, H * E, D);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 4, 1, E, D);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 4, 1, E, D);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, D, H * E);
    tiny_tensor(w, 0, 10, TINY_NONE, 0, 1, 0, 1, D);
    tiny_tensor(w, 0, 12, TINY_NONE, 0, 4, 1, F, D);
    tiny_tensor(w, 0, 13, TINY_NONE, 0, 4, 1, F, D);
    tiny_tensor(w, 0, 15, TINY_NONE, 0, 4, 1, D, F);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, V, D);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, D);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, E / 2);
}

/* A batch of sessions with different contexts has room for all of them; a sanitizer checks that it
 * stays within. */
static void test_batch_of_different_contexts(void) {
    enum { N = 2, LONG = 2 * BN_CHUNK_KEYS + 1, V = 50 };
    size_t size;
    uint8_t *file = tiny_file(many_heads, SIZE_MAX, SIZE_MAX, &size);
    const bn_session_options small = {.n_ctx = 1};
    const int32_t tokens[N] = {7, 8};
    int32_t text[LONG];
    bn_model *m;
    bn_session *together[N], *alone;
    for (int i = 0; i < LONG; i++)
        text[i] = i * i % V;
    ok(bn_model_open_bytes(file, size, NULL, &m, NULL));
    ok(bn_session_new(m, &small, &together[0]));
    ok(bn_session_new(m, NULL, &together[1]));
    ok(bn_session_append(together[1], text, LONG, BN_LOGITS_LAST, NULL));
    ok(bn_session_fork(together[1], &alone));
    ok(append_together(together, tokens, N));
    ok(bn_session_append(alone, &tokens[1], 1, BN_LOGITS_LAST, NULL));
    CHECK(memcmp(bn_session_logits(together[1]), bn_session_logits(alone), V * sizeof(float)) == 0);
    bn_session *mixed[N] = {together[1], prompted(model, NULL, prompt)};
    CHECK_EQ(append_together(mixed, tokens, N), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_position(mixed[1]), PROMPT);
    bn_session_free(mixed[1]);
    bn_session_free(together[0]);
    bn_session_free(together[1]);
    bn_session_free(alone);
    bn_model_close(m);
    free(file);
}

/* Caches take the memory they report, forks included. */
static void test_memory(void) {
    bn_session_options options = {.kv_type = BN_KV_F32};
    bn_model_info info;
    bn_session *f32, *s, *copy;
    ok(bn_model_get_info(model, &info));
    ok(bn_session_new(model, &options, &f32));
    for (options.kv_type = 0; options.kv_type < BN_KV_TYPES; options.kv_type++) {
        const uint64_t values = (uint64_t)LAYERS * KV_HEADS * 2 * HEAD;
        const uint64_t sizes[] = {2 * values, 4 * values, values + 4 * values / HEAD,
                                  values / 2 / HEAD * (HEAD + 4 + 4 * (HEAD / 8 + 1))};
        const uint64_t less =
            info.kv_bytes_per_token[BN_KV_F32] - info.kv_bytes_per_token[options.kv_type];
        ok(bn_session_new(model, &options, &s));
        ok(bn_session_fork(s, &copy));
        CHECK_EQ(info.kv_bytes_per_token[options.kv_type], sizes[options.kv_type]);
        CHECK_EQ(bn_session_bytes(f32) - bn_session_bytes(s), CONTEXT * less);
        CHECK_EQ(bn_session_bytes(s), bn_session_bytes(copy));
        CHECK(bn_kv_name(options.kv_type)[0] != 0);
        bn_session_free(s);
        bn_session_free(copy);
    }
    bn_session_free(f32);
    CHECK(strcmp(bn_kv_name(BN_KV_INT8), "int8") == 0);
    CHECK(bn_kv_name(BN_KV_TYPES) == NULL && bn_kv_name(-1) == NULL);
    CHECK_EQ(bn_session_new(model, &options, &s), BN_ERR_ARGUMENT);
    options.kv_type = -1;
    CHECK_EQ(bn_session_new(model, &options, &s), BN_ERR_ARGUMENT);
}

/* A forked child continues with idle sessions, with one thread, and reports that. */
static void test_forked_process(void) {
    bn_session *s = prompted(model, NULL, prompt), *right = prompted(model, NULL, prompt);
    bn_model_info info;
    ok(bn_model_get_info(model, &info));
    CHECK_EQ(info.threads, 2);
    ok(bn_session_append(right, prompt, 2, BN_LOGITS_LAST, NULL));
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        ok(bn_model_get_info(model, &info));
        CHECK_EQ(info.threads, 1);
        ok(bn_session_append(s, prompt, 2, BN_LOGITS_LAST, NULL));
        same_logits(s, right);
    }
    bn_session_free(s);
    bn_session_free(right);
    if (child == 0)
        _exit(0);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

/* Sessions keep what they need of a closed model. */
static void test_closed_before_its_sessions(void) {
    bn_session *s, *copy;
    bn_model *own;
    int32_t text[PROMPT], first, again, n;
    size_t size;
    uint8_t *file = open_large_vocabulary(&own, text, &size);
    ok(bn_session_new(own, NULL, &s));
    ok(bn_session_append(s, text, 5, BN_LOGITS_LAST, NULL));
    ok(bn_session_fork(s, &copy));
    ok(bn_session_step(copy, &(bn_sampler){0}, NULL, 0, &first, 1, &n));
    bn_model_close(own);
    bn_session_free(copy);
    ok(bn_session_step(s, &(bn_sampler){0}, NULL, 0, &again, 1, &n));
    CHECK_EQ(again, first);
    bn_session_free(s);
    free(file);
}

#if defined(__linux__)
/* What a session has not used is not in memory, also where another was freed before. */
static void test_committed_when_used(void) {
    enum { PAGES = 24 * VOCAB / 4096 + 1 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), size = bn_sample_scratch_size(VOCAB);
    for (int round = 0; round < 4; round++) {
        unsigned char there[PAGES];
        bn_session *s;
        ok(bn_session_new(model, NULL, &s));
        uint8_t *scratch = s->sampler_scratch;
        uint8_t *first = scratch + (page - (uintptr_t)scratch % page) % page;
        const size_t n = (size_t)(scratch + size - first) / page;
        CHECK(n <= PAGES && mincore(first, n * page, there) == 0);
        for (size_t i = 0; i < n; i++)
            CHECK_MSG(!(there[i] & 1), "round %d: page %zu of %zu", round, i, n);
        memset(scratch, 7, size);
        bn_session_free(s);
    }
}
#endif

int main(void) {
    size_t size;
    uint8_t *file = open_large_vocabulary(&model, prompt, &size);
    test_closed_before_its_sessions();
    test_memory();
#if defined(__linux__)
    test_committed_when_used();
#endif
    test_batch_of_different_contexts();
    test_forked_process();
    bn_model_close(model);
    free(file);
    return 0;
}
