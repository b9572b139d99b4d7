/* SPDX-License-Identifier: MIT
 *
 * test_together.c: one model, several threads: a long prompt holds nobody up for all of its length,
 * and a process that forks in the middle of it has a child that works.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */

#include "session/session.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "session_model.h"

static bn_model *model;
static int32_t prompt[PROMPT];
static atomic_int stop, prompts; /* how many were read */

/* The prompt again and again, in blocks of four tokens. */
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

/* Who asks for the pool has it between two blocks of a prompt, not after all of them. On a busy
 * machine most prompts are over before this thread runs at all, so they are read until ten were
 * interrupted. */
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
            position = s->position; /* changes in turns only */
            bn_pool_unlock(model->pool);
            between += position > 0 && position < PROMPT;
            sched_yield();
        }
        CHECK_EQ(pthread_join(thread, NULL), 0);
        bn_session_free(s);
    }
    CHECK_MSG(between >= 10, "%d", between);
}

/* The workspace grows while others compute in it, and goes only with the last session. */
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

/* In the child there is one thread, and whatever the others were about stays undone. */
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
        test_turns();
        test_growing();
        test_fork();
        bn_model_close(model);
    }
    free(file);
    return 0;
}
