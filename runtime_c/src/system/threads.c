/* SPDX-License-Identifier: MIT
 *
 * threads.c: see threads.h.
 *
 * A run uses two words: the caller increments `epoch` and every worker starts; each worker that
 * finishes decrements `pending`, and at zero the caller returns. Both sides spin first, since the
 * next event of a decode step is about a microsecond away, and then sleep on the word (wait.h).
 *
 * The work itself is one more word per thread: its share (steal.h).
 *
 * A worker joins an epoch by claiming it, and only threads that have joined access shares. Once all
 * shares are empty, the caller claims the epoch for workers that have not joined: a run does not
 * wait for a thread that is not running, and a late thread cannot take from the shares of the next
 * run.
 */
#define _GNU_SOURCE /* syscall, pthread_setname_np */

#include "threads.h"
#include "cores.h"
#include "floats.h"
#include "steal.h"
#include "wait.h"

#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { CACHE_LINE = 64 };

typedef struct member {
    bn_pool *pool;
    int32_t index; /* 0 is the caller, which needs no thread */
    pthread_t thread;
    alignas(CACHE_LINE)
        atomic_uint claimed; /* the latest epoch claimed, by the worker or by the caller for it */
    alignas(CACHE_LINE) bn_items share; /* items left */
} member;

struct bn_pool {
    int32_t n_threads;
    int32_t n_started; /* workers to join; 0 in a forked child, which has none */
    int spin;
    bn_task task; /* NULL tells the workers to exit */
    void *context;
    size_t most; /* most items of a part */
    /* bn_pool_lock admits callers in the order of their tickets. With a mutex, a caller that takes
     * the lock again and again would starve those that sleep. */
    atomic_uint tickets, serving;
    bn_pool *next; /* in the list of pools */
    bn_waiting waiting;
    /* Each on its own cache line, because waiting threads poll it. */
    alignas(CACHE_LINE) atomic_uint epoch;
    alignas(CACHE_LINE) atomic_uint pending;
    alignas(CACHE_LINE) atomic_uint sleepers; /* workers asleep, or about to be, on epoch */
    atomic_uint caller_sleeps;
    member members[]; /* n_threads */
};

/* --- The two sides of a run ---
 *
 * A thread that goes to sleep first announces it, then checks the word; a thread that changes the
 * word then checks for the announcement. Both pairs are sequentially consistent, so at least one of
 * the two sees the other. */

static unsigned await_epoch(bn_pool *pool, unsigned seen) {
    if (!pool->spin || !bn_spin_while(&pool->epoch, seen)) {
        atomic_fetch_add(&pool->sleepers, 1);
        while (atomic_load(&pool->epoch) == seen)
            bn_sleep_while(&pool->waiting, &pool->epoch, seen, BN_EVERYONE);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
    return atomic_load_explicit(&pool->epoch, memory_order_acquire);
}

static void start_epoch(bn_pool *pool, bn_task task, void *context) {
    pool->task = task;
    pool->context = context;
    atomic_store_explicit(&pool->pending, (unsigned)pool->n_started, memory_order_relaxed);
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleepers) != 0)
        bn_wake(&pool->waiting, &pool->epoch, BN_EVERYONE);
}

/* The first to claim the epoch for a member gets it. All earlier epochs have been claimed. */
static int join_epoch(member *m, unsigned epoch) {
    unsigned before = epoch - 1;
    return atomic_compare_exchange_strong(&m->claimed, &before, epoch);
}

static void finish(bn_pool *pool) {
    if (atomic_fetch_sub(&pool->pending, 1) == 1 && atomic_load(&pool->caller_sleeps))
        bn_wake(&pool->waiting, &pool->pending, BN_EVERYONE);
}

static void join_for_absent(bn_pool *pool) {
    const unsigned epoch = atomic_load_explicit(&pool->epoch, memory_order_relaxed);
    for (int32_t i = 1; i <= pool->n_started; i++)
        if (join_epoch(&pool->members[i], epoch))
            atomic_fetch_sub(&pool->pending, 1);
}

static void await_workers(bn_pool *pool) {
    unsigned left;
    while ((left = atomic_load_explicit(&pool->pending, memory_order_acquire)) != 0) {
        if (pool->spin && bn_spin_while(&pool->pending, left))
            continue;
        atomic_store(&pool->caller_sleeps, 1);
        if (atomic_load(&pool->pending) == left)
            bn_sleep_while(&pool->waiting, &pool->pending, left, BN_EVERYONE);
        atomic_store(&pool->caller_sleeps, 0);
    }
}

static void deal(bn_pool *pool, size_t items) {
    for (int32_t i = 0; i < pool->n_threads; i++) {
        size_t first, end;
        bn_share(items, i, pool->n_threads, &first, &end);
        bn_deal(&pool->members[i].share, first, end);
    }
}

static void work(bn_pool *pool, int32_t thread) {
    const bn_task task = pool->task;
    void *const context = pool->context;
    const size_t most = pool->most;
    size_t first, end;
    for (int32_t i = 0; i < pool->n_threads; i++) {
        member *of = &pool->members[(thread + i) % pool->n_threads];
        while (bn_take(&of->share, i == 0, most, &first, &end))
            task(context, thread, first, end);
    }
}

/* The name that ps and debuggers show: bitnet-1, bitnet-2, ... */
static void name_thread(int32_t index) {
#if defined(__linux__)
    char name[16]; /* the limit of Linux */
    snprintf(name, sizeof name, "bitnet-%d", (int)index);
    pthread_setname_np(pthread_self(), name);
#else
    (void)index;
#endif
}

static void *worker_main(void *argument) {
    member *self = argument;
    bn_pool *pool = self->pool;
    unsigned seen = 0;
    name_thread(self->index);
    bn_floats_standard(); /* a new thread inherits its creator's environment */
    for (;;) {
        seen = await_epoch(pool, seen);
        if (!join_epoch(self, seen))
            continue;
        if (pool->task == NULL)
            return NULL;
        work(pool, self->index);
        finish(pool);
    }
}

void bn_pool_run(bn_pool *pool, size_t items, size_t most, bn_task task, void *context) {
    if (items < 2 || bn_pool_running(pool) == 1) {
        for (size_t first = 0, end; first < items; first = end) {
            end = items - first < most ? items : first + most;
            task(context, 0, first, end);
        }
        return;
    }
    deal(pool, items);
    pool->most = most;
    start_epoch(pool, task, context);
    work(pool, 0);
    join_for_absent(pool);
    await_workers(pool);
}

/* --- fork ---
 *
 * A child has the memory of the pools but none of their threads, and a lock may be held by a thread
 * that does not exist in it. So the process keeps a list of its pools, and a child resets them. */

static void init_locks(bn_pool *pool) {
    atomic_init(&pool->tickets, 0);
    atomic_init(&pool->serving, 0);
    bn_waiting_init(&pool->waiting);
}

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static bn_pool *pools;

static void before_fork(void) {
    pthread_mutex_lock(&pools_lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&pools_lock);
}

static void after_fork_in_child(void) {
    for (bn_pool *pool = pools; pool != NULL; pool = pool->next) {
        pool->n_started = 0;
        init_locks(pool);
    }
    pthread_mutex_unlock(&pools_lock);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void register_pool(bn_pool *pool) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pools_lock);
    pool->next = pools;
    pools = pool;
    pthread_mutex_unlock(&pools_lock);
}

static void unregister_pool(bn_pool *pool) {
    bn_pool **at = &pools;
    pthread_mutex_lock(&pools_lock);
    while (*at != pool)
        at = &(*at)->next;
    *at = pool->next;
    pthread_mutex_unlock(&pools_lock);
}

/* --- Creation, destruction, locking --- */

/* Workers block signals, so that Ctrl-C reaches the program's own threads; except faults, which are
 * delivered to the thread that causes them. */
static int start_worker(member *self) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    const int error = pthread_create(&self->thread, NULL, worker_main, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

bn_status bn_pool_new(int32_t n_threads, bn_pool **out) {
    if (n_threads < 1 || n_threads > BN_MOST_THREADS || out == NULL)
        return BN_ERR_ARGUMENT;
    size_t size = sizeof(bn_pool) + (size_t)n_threads * sizeof(member);
    size = (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    bn_pool *pool = aligned_alloc(CACHE_LINE, size);
    if (pool == NULL)
        return BN_ERR_MEMORY;
    *pool = (bn_pool){.n_threads = n_threads, .spin = n_threads <= bn_usable_cpus()};
    init_locks(pool);
    register_pool(pool);
    for (int32_t i = 0; i < n_threads; i++)
        pool->members[i] = (member){.pool = pool, .index = i};
    while (pool->n_started < n_threads - 1) {
        if (start_worker(&pool->members[pool->n_started + 1]) != 0) {
            bn_pool_free(pool);
            return BN_ERR_THREAD;
        }
        pool->n_started++;
    }
    *out = pool;
    return BN_OK;
}

void bn_pool_free(bn_pool *pool) {
    if (pool == NULL)
        return;
    unregister_pool(pool);
    if (pool->n_started != 0)
        start_epoch(pool, NULL, NULL);
    for (int32_t i = 1; i <= pool->n_started; i++)
        pthread_join(pool->members[i].thread, NULL);
    bn_waiting_destroy(&pool->waiting);
    free(pool);
}

int32_t bn_pool_running(const bn_pool *pool) {
    return pool ? pool->n_started + 1 : 1;
}

int32_t bn_pool_threads(const bn_pool *pool) {
    return pool ? pool->n_threads : 1;
}

static uint32_t group_of(unsigned ticket) {
    return (uint32_t)1 << ticket % 32;
}

void bn_pool_lock(bn_pool *pool) {
    const unsigned mine = atomic_fetch_add(&pool->tickets, 1);
    for (unsigned now; (now = atomic_load(&pool->serving)) != mine;)
        bn_sleep_while(&pool->waiting, &pool->serving, now, group_of(mine));
}

void bn_pool_unlock(bn_pool *pool) {
    const unsigned next = atomic_fetch_add(&pool->serving, 1) + 1;
    if (atomic_load(&pool->tickets) != next)
        bn_wake(&pool->waiting, &pool->serving, group_of(next));
}

void bn_share(size_t n, int32_t thread, int32_t n_threads, size_t *first, size_t *last) {
    const size_t i = (size_t)thread, parts = (size_t)n_threads;
    const size_t each = n / parts, more = n % parts; /* the first `more` parts have one extra */
    *first = each * i + (i < more ? i : more);
    *last = *first + each + (i < more ? 1 : 0);
}
