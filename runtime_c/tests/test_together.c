/* SPDX-License-Identifier: MIT
 *
 * test_together.c: one model, several threads: a long prompt does not block others for its whole
 * length, a process that forks in the middle of it has a working child, and texts that choose
 * tokens in parallel choose the same as alone.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */

#include "session/session.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "session_model.h"

static bn_model *model;
static int32_t prompt[PROMPT];
static atomic_int stop, prompts; /* number of prompts processed */

/* Append the prompt again and again, in blocks of four tokens. */
static void *read_prompts(void *unused) {
    const bn_session_options options = {.batch = 4};
    bn_session *s;
    ok(bn_session_new(model, &options, &s));
    while (!atomic_load(&stop)) {
        ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_NONE, NULL));
        ok(bn_session_rewind(s, 0));
        atomic_fetch_add(&prompts, 1);
    }
    bn_session_free(s);
    return unused;
}

static pthread_t start_reading(void) {
    pthread_t thread;
    atomic_store(&stop, 0);
    atomic_store(&prompts, 0);
    CHECK_EQ(pthread_create(&thread, NULL, read_prompts, NULL), 0);
    while (atomic_load(&prompts) == 0)
        sched_yield();
    return thread;
}

static void end_reading(pthread_t thread) {
    atomic_store(&stop, 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

static void *read_once(void *session) {
    ok(bn_session_append(session, prompt, PROMPT, BN_LOGITS_NONE, NULL));
    return NULL;
}

/* A waiting caller gets the pool between two blocks of a prompt, not after all of them. On a busy
 * machine most prompts are over before this thread runs at all, so they are processed until ten
 * were interrupted. */
static void test_turns(void) {
    const bn_session_options options = {.batch = 4};
    const time_t deadline = time(NULL) + 60;
    int between = 0;
    while (between < 10 && time(NULL) < deadline) {
        bn_session *s;
        pthread_t thread;
        ok(bn_session_new(model, &options, &s));
        CHECK_EQ(pthread_create(&thread, NULL, read_once, s), 0);
        for (int position = 0; position < PROMPT;) {
            bn_pool_lock(model->pool);
            position = s->position; /* changes only during a turn */
            bn_pool_unlock(model->pool);
            between += position > 0 && position < PROMPT;
            sched_yield();
        }
        CHECK_EQ(pthread_join(thread, NULL), 0);
        bn_session_free(s);
    }
    CHECK_MSG(between >= 10, "%d", between);
}

/* The workspace grows while others use it, and is freed only with the last session. */
static void test_growing(void) {
    bn_session *s;
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_LAST, NULL));
    const float *expected = bn_session_logits(s);
    float *copy = malloc(VOCAB * sizeof *copy);
    CHECK(copy != NULL && expected != NULL);
    memcpy(copy, expected, VOCAB * sizeof *copy);
    bn_session_free(s);
    for (int round = 0; round < 5; round++) {
        const pthread_t thread = start_reading();
        for (int32_t batch = 5; batch <= PROMPT; batch *= 3) {
            const bn_session_options options = {.batch = batch};
            ok(bn_session_new(model, &options, &s));
            ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_LAST, NULL));
            CHECK(memcmp(bn_session_logits(s), copy, VOCAB * sizeof *copy) == 0);
            bn_session_free(s);
        }
        end_reading(thread);
        CHECK(model->work == NULL);
    }
    free(copy);
}

/* The child has one thread, and whatever the others were doing stays undone. */
static void live_as_child(const float *expected) {
    bn_session *s;
    alarm(60);
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_LAST, NULL));
    CHECK(memcmp(bn_session_logits(s), expected, VOCAB * sizeof *expected) == 0);
    bn_session_free(s);
    bn_model_close(model);
}

static void test_fork(void) {
    bn_session *s;
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_LAST, NULL));
    const float *expected = bn_session_logits(s);
    const pthread_t thread = start_reading();
    for (int i = 0; i < 30; i++) {
        const pid_t child = fork();
        int status = 0;
        CHECK(child >= 0);
        if (child == 0) {
            live_as_child(expected);
            _exit(0);
        }
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child ended with %#x", status);
    }
    end_reading(thread);
    bn_session_free(s);
}

/* --- texts that choose in parallel --- */

enum { CHOOSERS = 7, CHOICES = 24, AT_ONCE = 4, WORDS = (VOCAB + 31) / 32 };

static uint32_t few[AT_ONCE][WORDS], many[AT_ONCE][WORDS]; /* rows of `allowed` */
static int32_t expected[CHOOSERS][CHOICES];

static bn_sampler sampler_of(int i) {
    static const int32_t tokens[] = {3, 5000};
    static const float values[] = {4, -2};
    const bn_sampler all[CHOOSERS] = {
        {0},
        {.temperature = 1, .top_k = 40},
        {.temperature = 1.5f, .top_p = 0.9f},
        {.temperature = 2, .top_k = 20, .repeat_penalty = 1.3f, .penalty_window = 64},
        {.temperature = 1, .top_k = 9, .allowed = few[0]},
        {.temperature = 1, .top_k = 60, .allowed = many[0]},
        {.temperature = 1, .top_k = 5, .n_bias = 2, .bias_tokens = tokens, .bias_values = values}};
    return all[i];
}

/* A text with a prompt. */
static bn_session *chooser(int i) {
    bn_session *s;
    ok(bn_session_new(model, NULL, &s));
    bn_session_seed(s, (uint64_t)i);
    ok(bn_session_append(s, prompt + i, 20 + i, BN_LOGITS_LAST, NULL));
    return s;
}

/* One token at a time, each text alone. */
static void choose_alone(void) {
    for (int i = 0; i < CHOOSERS; i++) {
        bn_session *s = chooser(i);
        const bn_sampler sampler = sampler_of(i);
        for (int n = 0; n < CHOICES; n++) {
            bn_entry e = {.session = s,
                          .tokens = n > 0 ? &expected[i][n - 1] : prompt,
                          .n_tokens = 1,
                          .most = 1,
                          .sampler = &sampler,
                          .chosen = &expected[i][n]};
            ok(bn_step_batch(&e, 1));
        }
        bn_session_free(s);
    }
}

/* All in one pass, with some wrong guesses, next to a prompt: the same tokens. */
static void choose_together(uint64_t random) {
    bn_session *s[CHOOSERS], *reader;
    int32_t n[CHOOSERS] = {0}, drafts[CHOOSERS][AT_ONCE], chosen[CHOOSERS][AT_ONCE], going;
    bn_sampler samplers[CHOOSERS];
    ok(bn_session_new(model, NULL, &reader));
    for (int i = 0; i < CHOOSERS; i++)
        s[i] = chooser(i), samplers[i] = sampler_of(i);
    do {
        bn_entry entries[CHOOSERS + 1];
        int of[CHOOSERS];
        going = 0;
        for (int i = 0; i < CHOOSERS; i++) {
            const int32_t left = CHOICES - n[i], most = left < AT_ONCE ? left : AT_ONCE;
            if (left == 0)
                continue;
            for (int32_t j = 0; j < most; j++)
                drafts[i][j] = check_below(&random, 4) ? expected[i][n[i] + j] : 7;
            of[going] = i;
            entries[going++] = (bn_entry){.session = s[i],
                                          .tokens = n[i] > 0 ? &expected[i][n[i] - 1] : prompt,
                                          .n_tokens = 1,
                                          .most = most,
                                          .sampler = &samplers[i],
                                          .draft = drafts[i],
                                          .n_draft = most - 1,
                                          .chosen = chosen[i]};
        }
        entries[going] = (bn_entry){.session = reader, .tokens = prompt, .n_tokens = 5};
        ok(bn_step_batch(entries, going + 1));
        for (int j = 0; j < going; j++) {
            const int i = of[j];
            CHECK(entries[j].n_chosen > 0);
            CHECK(memcmp(chosen[i], expected[i] + n[i],
                         (size_t)entries[j].n_chosen * sizeof **chosen) == 0);
            n[i] += entries[j].n_chosen;
        }
    } while (going > 0);
    for (int i = 0; i < CHOOSERS; i++)
        bn_session_free(s[i]);
    bn_session_free(reader);
}

static void test_choices(void) {
    for (int row = 0; row < AT_ONCE; row++)
        for (int32_t token = 0; token < VOCAB; token++) {
            few[row][token / 32] |= (uint32_t)(token % 500 == 0) << token % 32;
            many[row][token / 32] |= (uint32_t)(token % 3 > 0) << token % 32;
        }
    choose_alone();
    for (uint64_t seed = 1; seed <= 3; seed++)
        choose_together(seed);
}

int main(void) {
    size_t size;
    uint8_t *file = tiny_file(large_vocabulary, SIZE_MAX, SIZE_MAX, &size);
    uint64_t random = 1;
    alarm(300);
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (int32_t)check_below(&random, VOCAB);
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        const bn_load_options options = {.threads = threads};
        ok(bn_model_open_bytes(file, size, &options, &model, NULL));
        test_choices();
        test_turns();
        test_growing();
        test_fork();
        bn_model_close(model);
    }
    free(file);
    return 0;
}
