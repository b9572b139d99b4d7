/* SPDX-License-Identifier: MIT
 *
 * test_threads.c: every item is processed exactly once and its result is visible to the caller, for
 * pools smaller and larger than the machine, awake and asleep, from several callers, and on both
 * sides of a fork. A hang is a failure: the alarm ends it.
 */
#define _GNU_SOURCE /* fork, setrlimit */

#include "check.h"
#include "system/threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256, TIME_LIMIT_S = 300 };

static void rest_us(long us) {
    const struct timespec pause = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

static void test_share(void) {
    const size_t sizes[] = {0, 1, 2, 3, 15, 16, 17, 1000, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int32_t n_threads = 1; n_threads <= MAX_THREADS; n_threads++) {
            size_t next = 0, least = SIZE_MAX, most = 0;
            for (int32_t t = 0; t < n_threads; t++) {
                size_t first, last;
                bn_share(sizes[i], t, n_threads, &first, &last);
                CHECK(first == next && last >= first);
                next = last;
                least = last - first < least ? last - first : least;
                most = last - first > most ? last - first : most;
            }
            CHECK(next == sizes[i] && most - least <= 1);
        }
    }
}

enum { MOST_ITEMS = 300 };

/* Plain, non-atomic memory: what a run wrote must be visible when it returns. */
typedef struct record {
    int32_t calls[MOST_ITEMS]; /* per item */
    size_t longest;            /* longest part of thread 0 */
    int32_t n_threads;
    atomic_int wrong; /* empty parts, or parts of a thread not in the pool */
} record;

static void count_calls(void *context, int32_t thread, size_t first, size_t end) {
    record *r = context;
    if (first >= end || thread < 0 || thread >= r->n_threads)
        atomic_store(&r->wrong, 1);
    for (size_t i = first; i < end; i++)
        r->calls[i]++;
    if (thread == 0 && end - first > r->longest)
        r->longest = end - first;
}

/* Runs of 0, 1, … items in parts of 1, 2, …: every item is done once a run, none beyond. */
static void check_runs(bn_pool *pool, int runs, long pause_us) {
    static record r; /* shared by all callers: the pool's lock keeps them apart */
    memset(&r, 0, sizeof r);
    r.n_threads = bn_pool_threads(pool);
    for (int run = 0; run < runs; run++) {
        const size_t items = (size_t)run % MOST_ITEMS, most = 1 + (size_t)run % 7;
        memset(r.calls, 0, sizeof r.calls);
        r.longest = 0;
        bn_pool_run(pool, items, most, count_calls, &r);
        for (size_t i = 0; i < MOST_ITEMS; i++)
            CHECK_EQ(r.calls[i], i < items);
        CHECK(r.longest <= most);
        CHECK(!atomic_load(&r.wrong));
        if (pause_us > 0)
            rest_us(pause_us);
    }
}

static bn_pool *new_pool(int32_t n_threads) {
    bn_pool *pool = NULL;
    CHECK_EQ(bn_pool_new(n_threads, &pool), BN_OK);
    CHECK_EQ(bn_pool_threads(pool), n_threads);
    return pool;
}

static void test_runs(void) {
    const int32_t sizes[] = {1, 2, 3, 4, 8, 33, MAX_THREADS};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        bn_pool *pool = new_pool(sizes[i]);
        check_runs(pool, sizes[i] <= 4 ? 20000 : 100, 0);
        bn_pool_free(pool);
    }
    for (int i = 0; i < 100; i++) /* freed before, while and after the workers start */
        bn_pool_free(new_pool(1 + i % 5));
    bn_pool_free(NULL);
}

/* Pauses about as long as the workers spin: some runs find them falling asleep. */
static void test_sleepers(void) {
    bn_pool *pool = new_pool(2);
    for (long us = 1; us < 200; us += 3)
        check_runs(pool, 10, us);
    bn_pool_free(pool);
}

static void test_idle_costs_nothing(void) {
    bn_pool *pool = new_pool(8);
    check_runs(pool, 10, 0);
    rest_us(20000);
    const clock_t before = clock(); /* processor time of all threads */
    rest_us(200000);
    const double used = (double)(clock() - before) / CLOCKS_PER_SEC;
    CHECK_MSG(used < 0.05, "an idle pool used %g s of processor time in 0.2 s", used);
    bn_pool_free(pool);
}

/* Thread 0 stays in its first part until all others are done: the rest of its share is stolen. */
typedef struct straggle {
    int32_t by[MOST_ITEMS];
    atomic_int done;
} straggle;

static void hold_thread_0(void *context, int32_t thread, size_t first, size_t end) {
    straggle *s = context;
    for (size_t i = first; i < end; i++)
        s->by[i] = thread;
    const int n = (int)(end - first), others = MOST_ITEMS - n;
    while (thread == 0 && atomic_load(&s->done) < others)
        sched_yield();
    atomic_fetch_add(&s->done, n);
}

static void test_helping(void) {
    for (int32_t n_threads = 2; n_threads <= 4; n_threads++) {
        straggle s = {.done = 0};
        int32_t by_0 = 0;
        memset(s.by, 0xFF, sizeof s.by);
        bn_pool *pool = new_pool(n_threads);
        bn_pool_run(pool, MOST_ITEMS, 8, hold_thread_0, &s);
        for (size_t i = 0; i < MOST_ITEMS; i++) {
            CHECK(s.by[i] >= 0);
            by_0 += s.by[i] == 0;
        }
        CHECK(by_0 <= 8); /* at most its first part, 0 if it started too late */
        bn_pool_free(pool);
    }
}

/* --- Several callers --- */

static void take_turns(bn_pool *pool) {
    for (int i = 0; i < 300; i++) {
        bn_pool_lock(pool);
        check_runs(pool, 3, 0);
        bn_pool_unlock(pool);
    }
}

static void *caller_main(void *pool) {
    take_turns(pool);
    return NULL;
}

static void test_callers(void) {
    bn_pool *pool = new_pool(3);
    pthread_t callers[3];
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&callers[i], NULL, caller_main, pool), 0);
    take_turns(pool);
    for (int i = 0; i < 3; i++)
        pthread_join(callers[i], NULL);
    bn_pool_free(pool);
}

/* Waiting callers get a turn before the current one gets another: three that arrive while the pool
 * is taken have had theirs when the same caller gets its next. */
typedef struct queue {
    bn_pool *pool;
    atomic_int served;
} queue;

static void *wait_for_turn(void *argument) {
    queue *q = argument;
    bn_pool_lock(q->pool);
    check_runs(q->pool, 3, 0);
    atomic_fetch_add(&q->served, 1);
    bn_pool_unlock(q->pool);
    return NULL;
}

static void test_turns(void) {
    enum { ROUNDS = 200, ENOUGH = 10, WAITING = 3 };
    queue q = {.pool = new_pool(2)};
    int fair = 0;
    bn_pool_lock(q.pool);
    for (int i = 0; i < ROUNDS && fair < ENOUGH; i++) {
        pthread_t threads[WAITING];
        atomic_store(&q.served, 0);
        for (int t = 0; t < WAITING; t++)
            CHECK_EQ(pthread_create(&threads[t], NULL, wait_for_turn, &q), 0);
        rest_us(5000); /* long enough for them to arrive, unless the machine is busy */
        CHECK_EQ(atomic_load(&q.served), 0);
        bn_pool_unlock(q.pool);
        bn_pool_lock(q.pool);
        fair += atomic_load(&q.served) == WAITING;
        bn_pool_unlock(q.pool);
        for (int t = 0; t < WAITING; t++)
            pthread_join(threads[t], NULL);
        bn_pool_lock(q.pool);
    }
    bn_pool_unlock(q.pool);
    bn_pool_free(q.pool);
    CHECK_MSG(fair == ENOUGH, "in %d of %d rounds", fair, ROUNDS);
}

/* --- fork --- */

static void check_child(pid_t child) {
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child ended with %#x", status);
}

/* The child uses the parent's pool, alone; so does its own child; then both free it. */
static void live_as_child(bn_pool *pool, int generations) {
    alarm(TIME_LIMIT_S);
    take_turns(pool);
    if (generations > 0) {
        const pid_t child = fork();
        if (child == 0) {
            live_as_child(pool, generations - 1);
            _exit(0);
        }
        check_child(child);
    }
    bn_pool_free(pool);
    if (SANITIZED) /* ThreadSanitizer refuses threads after a fork with threads */
        return;
    pool = new_pool(3);
    check_runs(pool, 10, 0);
    bn_pool_free(pool);
}

static pid_t fork_child(bn_pool *pool, int generations) {
    const pid_t child = fork();
    if (child == 0) {
        live_as_child(pool, generations);
        _exit(0);
    }
    return child;
}

static void test_fork(void) {
    bn_pool *pool = new_pool(3);
    for (int i = 0; i < 10; i++) {
        check_runs(pool, 10, 0);
        rest_us(40 * i); /* workers awake, then asleep */
        check_child(fork_child(pool, 1));
        check_runs(pool, 10, 0); /* the parent is unaffected */
    }
    pthread_t caller; /* at some of these forks the other thread holds the lock */
    CHECK_EQ(pthread_create(&caller, NULL, caller_main, pool), 0);
    for (int i = 0; i < 10; i++) {
        check_child(fork_child(pool, 0));
    }
    pthread_join(caller, NULL);
    bn_pool_free(pool);
}

/* In a child all pools work without their threads, also after pools that are older, newer and in
 * between were freed. */
static void test_fork_with_many(void) {
    enum { N = 5 };
    bn_pool *pools[N];
    for (int i = 0; i < N; i++)
        pools[i] = new_pool(2);
    const int order[] = {2, 4, 0}; /* between two others, the newest, the oldest */
    for (int i = 0; i < 3; i++) {
        bn_pool_free(pools[order[i]]);
        pools[order[i]] = NULL;
        for (int j = 0; j < N; j++)
            if (pools[j])
                check_child(fork_child(pools[j], 0));
    }
    for (int i = 0; i < N; i++)
        bn_pool_free(pools[i]);
}

/* --- Signals --- */

typedef struct mask_test {
    sigset_t masks[3];
    atomic_int seen;
} mask_test;

static void look_at_mask(void *context, int32_t thread, size_t first, size_t end) {
    mask_test *test = context;
    (void)first, (void)end;
    pthread_sigmask(SIG_BLOCK, NULL, &test->masks[thread]);
    atomic_fetch_add(&test->seen, 1);
    while (atomic_load(&test->seen) < 3)
        sched_yield(); /* otherwise one thread could process several of the three items */
}

static void test_signals(void) {
    mask_test test = {.seen = 0};
    sigset_t *masks = test.masks, before, after;
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    bn_pool *pool = new_pool(3);
    bn_pool_run(pool, 3, 1, look_at_mask, &test);
    for (int t = 1; t < 3; t++) {
        CHECK(sigismember(&masks[t], SIGINT) && sigismember(&masks[t], SIGTERM));
        CHECK(sigismember(&masks[t], SIGALRM) && sigismember(&masks[t], SIGCHLD));
        CHECK(!sigismember(&masks[t], SIGSEGV) && !sigismember(&masks[t], SIGBUS));
    }
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    CHECK_EQ(sigismember(&after, SIGINT), sigismember(&before, SIGINT));
    bn_pool_free(pool);
}

/* --- Names --- */

#if defined(__linux__)
typedef struct names {
    char of[3][16];
    atomic_int seen;
} names;

static void look_at_name(void *context, int32_t thread, size_t first, size_t end) {
    names *n = context;
    (void)first, (void)end;
    CHECK_EQ(pthread_getname_np(pthread_self(), n->of[thread], sizeof n->of[thread]), 0);
    atomic_fetch_add(&n->seen, 1);
    while (atomic_load(&n->seen) < 3)
        sched_yield();
}

static void test_names(void) {
    names n = {.seen = 0};
    char before[16];
    CHECK_EQ(pthread_getname_np(pthread_self(), before, sizeof before), 0);
    bn_pool *pool = new_pool(3);
    bn_pool_run(pool, 3, 1, look_at_name, &n);
    CHECK(strcmp(n.of[0], before) == 0); /* the caller's name is unchanged */
    CHECK(strcmp(n.of[1], "bitnet-1") == 0 && strcmp(n.of[2], "bitnet-2") == 0);
    bn_pool_free(pool);
}
#else
static void test_names(void) {
}
#endif

/* --- Failures --- */

/* Of threads to come, whatever the C library gives them: with musl all would fit. */
static void large_stacks(void) {
#if defined(__linux__)
    pthread_attr_t attributes;
    CHECK_EQ(pthread_attr_init(&attributes), 0);
    CHECK_EQ(pthread_attr_setstacksize(&attributes, 8u << 20), 0);
    CHECK_EQ(pthread_setattr_default_np(&attributes), 0);
    pthread_attr_destroy(&attributes);
#endif
}

static void test_refusals(void) {
    bn_pool *pool = NULL;
    CHECK_EQ(bn_pool_new(0, &pool), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_pool_new(-1, &pool), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_pool_new(MAX_THREADS + 1, &pool), BN_ERR_ARGUMENT);
    CHECK(pool == NULL);
    if (SANITIZED) /* sanitizers map far more memory than the limit */
        return;
    const pid_t child = fork();
    if (child == 0) { /* room for some of the stacks, not for all */
        const struct rlimit limit = {256u << 20, 256u << 20};
        alarm(TIME_LIMIT_S);
        large_stacks();
        CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
        CHECK_EQ(bn_pool_new(MAX_THREADS, &pool), BN_ERR_THREAD);
        CHECK(pool == NULL);
        bn_pool_free(new_pool(2)); /* nothing was left behind */
        _exit(0);
    }
    check_child(child);
}

int main(void) {
    alarm(TIME_LIMIT_S);
    test_share();
    test_runs();
    test_sleepers();
    test_idle_costs_nothing();
    test_helping();
    test_callers();
    test_turns();
    test_fork();
    test_fork_with_many();
    test_signals();
    test_names();
    test_refusals();
    return 0;
}
