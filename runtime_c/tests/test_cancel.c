/* SPDX-License-Identifier: MIT
 *
 * test_cancel.c: a cancel ends what a session does at any point, lasts until the session is
 * rewound, and loses no finished token, neither of this session nor of others in the batch.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "session/batch.h"
#include "session/session.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "session_model.h"
#include "together.h"

static bn_model *model;
static int32_t prompt[PROMPT];

/* Every call fails before any work and changes nothing; after a rewind to the current position it
 * works. */
static void test_cancelled_calls(void) {
    int32_t token, n, out[2];
    float score, vector[DIM];
    bn_session *s = prompted(model, NULL, prompt), *other = prompted(model, NULL, prompt), *copy;
    ok(bn_session_new(model, NULL, &copy));
    bn_session *const embedding[] = {copy, s};
    const int32_t *const texts[] = {prompt, prompt};
    const int32_t lengths[] = {3, 3};
    CHECK(!bn_session_cancelled(s));
    bn_session_cancel(s);
    bn_session_cancel(s);
    CHECK(bn_session_cancelled(s) && !bn_session_cancelled(other));
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(bn_session_append(s, prompt, 1, BN_LOGITS_LAST, NULL), BN_ERR_CANCELLED);
        CHECK_EQ(bn_session_sample(s, NULL, &token), BN_ERR_CANCELLED);
        CHECK_EQ(bn_session_step(s, NULL, NULL, 0, out, 1, &n), BN_ERR_CANCELLED);
        CHECK_EQ(bn_session_step(s, NULL, prompt, 2, out, 2, &n), BN_ERR_CANCELLED);
        CHECK_EQ(bn_session_score(s, prompt, 1, &score), BN_ERR_CANCELLED);
        CHECK_EQ(bn_session_embed(s, prompt, 1, BN_POOL_LAST, vector), BN_ERR_CANCELLED);
        CHECK_EQ(bn_session_repeat(s, PROMPT + 1), BN_ERR_CANCELLED);
        CHECK_EQ(append_together(&(bn_session *){s}, prompt, 1), BN_ERR_CANCELLED);
        CHECK_EQ(bn_embed_batch(embedding, texts, lengths, 2, BN_POOL_LAST, NULL),
                 BN_ERR_CANCELLED);
    }
    CHECK_EQ(bn_session_position(s), PROMPT);
    CHECK_EQ(bn_session_position(other), PROMPT); /* nothing was done */
    CHECK_EQ(bn_session_position(copy), 0);
    bn_session_free(copy);
    same_logits(s, other);
    ok(bn_session_fork(s, &copy));
    CHECK(!bn_session_cancelled(copy));
    ok(append_together((bn_session *const[]){other, copy}, prompt, 2));
    ok(bn_session_rewind(s, PROMPT));
    CHECK(!bn_session_cancelled(s));
    ok(bn_session_sample(s, NULL, &token)); /* its logits are still available */
    ok(bn_session_append(s, prompt + 1, 1, BN_LOGITS_LAST, NULL));
    same_logits(s, copy);
    CHECK(!bn_session_cancelled(NULL));
    bn_session_cancel(NULL);
    bn_session_free(s);
    bn_session_free(other);
    bn_session_free(copy);
}

/* One thread generates tokens; another cancels it at some moment. */
typedef struct race {
    bn_session *session;
    atomic_int made, cancel_at, cancelled;
} race;

static void *cancel_at(void *context) {
    race *r = context;
    while (atomic_load(&r->made) < atomic_load(&r->cancel_at))
        sched_yield();
    bn_session_cancel(r->session);
    atomic_store(&r->cancelled, 1);
    return NULL;
}

/* A generation always ends, whether the cancel comes between two calls or during one. */
static void test_cancelled_generation(void) {
    const bn_sampler sampler = {.temperature = 1, .top_k = 20};
    uint64_t random = 5;
    bn_session *s = prompted(model, NULL, prompt);
    int32_t draft[3] = {1, 2, 3}, tokens[3], n;
    for (int round = 0; round < 50; round++) {
        race r = {.session = s, .cancel_at = (int)check_below(&random, NEW)};
        pthread_t thread;
        bn_status status = BN_OK;
        CHECK_EQ(pthread_create(&thread, NULL, cancel_at, &r), 0);
        while (!status) {
            while (r.made == NEW && !r.cancelled) /* the other thread may be slow to start */
                sched_yield();
            if (round % 2) {
                status = bn_session_step(s, &sampler, draft, 3, tokens, 3, &n);
            } else {
                status = bn_session_sample(s, &sampler, tokens);
                if (!status)
                    status = bn_session_append(s, tokens, 1, BN_LOGITS_LAST, NULL);
            }
            r.made++;
        }
        CHECK_EQ(status, BN_ERR_CANCELLED);
        pthread_join(thread, NULL);
        CHECK_EQ(bn_session_append(s, prompt, 1, BN_LOGITS_LAST, NULL), BN_ERR_CANCELLED);
        ok(bn_session_rewind(s, PROMPT - 1));
        ok(bn_session_append(s, prompt + PROMPT - 1, 1, BN_LOGITS_LAST, NULL));
    }
    bn_session_free(s);
}

static void *cancel_often(void *context) {
    race *r = context;
    while (!atomic_load(&r->cancelled)) {
        bn_session_cancel(r->session);
        sched_yield();
    }
    return NULL;
}

/* A long append cancelled while it runs keeps whole blocks and can be completed. */
static void test_cancelled_append(void) {
    const bn_session_options options = {.batch = 1};
    bn_session *s, *right = prompted(model, NULL, prompt);
    pthread_t thread;
    int32_t at = 0;
    ok(bn_session_new(model, &options, &s));
    race r = {.session = s};
    CHECK_EQ(pthread_create(&thread, NULL, cancel_often, &r), 0);
    for (int within = 0; within < 10;) {
        at = bn_session_position(s) % PROMPT; /* start again if it completed */
        ok(bn_session_rewind(s, at));
        const bn_status status =
            bn_session_append(s, prompt + at, PROMPT - at, BN_LOGITS_LAST, NULL);
        CHECK(status == BN_OK || status == BN_ERR_CANCELLED);
        CHECK_EQ(bn_session_position(s) == PROMPT, status == BN_OK);
        CHECK_EQ(bn_session_logits(s) != NULL, status == BN_OK);
        within += status && bn_session_position(s) > at;
    }
    atomic_store(&r.cancelled, 1);
    pthread_join(thread, NULL);
    at = bn_session_position(s);
    ok(bn_session_rewind(s, at));
    ok(bn_session_append(s, prompt + at, PROMPT - at, BN_LOGITS_LAST, NULL));
    same_logits(s, right);
    bn_session_free(s);
    bn_session_free(right);
}

/* One text is cancelled while all are computed: each keeps what it has and can be completed. */
static void test_cancelled_batch(void) {
    enum { N = 4, WHOLE = 200 };
    const bn_session_options one = {.batch = 1};
    const int32_t *rest[N] = {prompt, prompt, prompt, prompt};
    int32_t left[N] = {WHOLE, 1, WHOLE, WHOLE};
    bn_session *sessions[N], *alone;
    float out[DIM], expected[DIM];
    pthread_t thread;
    for (int i = 0; i < N; i++)
        ok(bn_session_new(model, &one, &sessions[i]));
    race r = {.session = sessions[2]};
    CHECK_EQ(pthread_create(&thread, NULL, cancel_often, &r), 0);
    for (int32_t held = 0; held == 0 || held == 3 * WHOLE + 1;) {
        held = 0;
        for (int i = 0; i < N; i++)
            ok(bn_session_rewind(sessions[i], 0));
        const bn_status status = bn_embed_batch(sessions, rest, left, N, BN_POOL_MEAN, NULL);
        for (int i = 0; i < N; i++)
            held += bn_session_position(sessions[i]);
        CHECK_EQ(status, held == 3 * WHOLE + 1 ? BN_OK : BN_ERR_CANCELLED);
    }
    atomic_store(&r.cancelled, 1);
    pthread_join(thread, NULL);
    CHECK(bn_session_cancelled(sessions[2]));
    ok(bn_session_rewind(sessions[2], bn_session_position(sessions[2])));
    ok(bn_session_new(model, NULL, &alone));
    ok(bn_session_embed(alone, prompt, WHOLE, BN_POOL_MEAN, expected));
    for (int i = 0; i < N; i++) {
        const int32_t at = bn_session_position(sessions[i]);
        if (i == 1 || at == WHOLE)
            continue;
        ok(bn_session_embed(sessions[i], prompt + at, WHOLE - at, BN_POOL_MEAN, out));
        CHECK(memcmp(out, expected, sizeof out) == 0);
    }
    bn_session_free(alone);
    for (int i = 0; i < N; i++)
        bn_session_free(sessions[i]);
}

/* A cancel ends a pass only if this is one whole text that is longer than a batch: other texts
 * would end with it, and short ones end soon. */
static void test_cancelled_pass(void) {
    enum { BATCH = 4 };
    static const struct {
        int32_t held, n, prefix;
        bn_status status;
    } passes[] = {{0, BATCH + 1, BATCH + 1, BN_ERR_CANCELLED},
                  {0, BATCH, BATCH, BN_OK},
                  {0, BATCH + 1, BATCH, BN_OK},      /* its prefix, then other texts */
                  {1, BATCH + 1, BATCH + 1, BN_OK}}; /* it has begun before */
    bn_session *s, *large;                           /* which makes room for longer passes */
    ok(bn_session_new(model, &(bn_session_options){.batch = BATCH}, &s));
    ok(bn_session_new(model, NULL, &large));
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        ok(bn_session_rewind(s, 0));
        if (passes[i].held > 0)
            ok(bn_session_append(s, prompt, passes[i].held, BN_LOGITS_NONE, NULL));
        ok(bn_session_reserve(s, passes[i].n));
        bn_batch b = bn_batch_begin(s);
        for (int32_t row = 0; row < passes[i].n; row++)
            bn_batch_add(&b, s, prompt[row], BN_WANT_NOTHING);
        s->cache.prefix = (size_t)passes[i].prefix;
        bn_session_cancel(s);
        CHECK_EQ(bn_batch_run(&b), passes[i].status);
        bn_batch_end(&b);
        CHECK_EQ(bn_session_position(s), passes[i].held + (passes[i].status ? 0 : passes[i].n));
    }
    bn_session_free(s);
    bn_session_free(large);
}

int main(void) {
    size_t size;
    uint8_t *file = open_large_vocabulary(&model, prompt, &size);
    test_cancelled_calls();
    test_cancelled_generation();
    test_cancelled_append();
    test_cancelled_batch();
    test_cancelled_pass();
    bn_model_close(model);
    free(file);
    return 0;
}
