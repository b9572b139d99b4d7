/* SPDX-License-Identifier: MIT
 *
 * threads.c: the pool behind threads.h.
 *
 * A run is two words: the caller bumps `epoch` and every worker starts; each share done takes one
 * from `pending` and at zero the caller returns. Both sides first spin, since the next event of a
 * decode step is about a microsecond away, and sleep on the word when it is not. Spinning only
 * helps on a processor of one's own: a pool larger than the usable processors never spins.
 *
 * Who does a share claims it first. When the caller is done with its own it does those whose
 * workers have not come, because they sleep or another program has their processor: on a busy
 * machine a run must not wait for a thread that is not running.
 */
#define _GNU_SOURCE /* syscall */

#include "threads.h"
#include "cores.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#if defined(__linux__) && !defined(BN_NO_FUTEX)
#define BN_FUTEX 1
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { CACHE_LINE = 64, MAX_THREADS = 256, SPIN_NS = 80000, PAUSES_PER_CLOCK = 32 };

typedef struct worker {
    bn_pool *pool;
    int32_t index;
    pthread_t thread;
    alignas(CACHE_LINE)
        atomic_uint claimed; /* the latest epoch whose share of this worker is taken */
} worker;

struct bn_pool {
    int32_t n_threads;
    int32_t n_started; /* workers to join; 0 in a forked child, which has none */
    int spin;
    bn_task task; /* NULL tells the workers to leave */
    void *context;
    pthread_mutex_t turn; /* bn_pool_lock */
    bn_pool *next, *previous;
#ifndef BN_FUTEX
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
    /* Each on a line of its own: a waiting thread reads it all the time. */
    alignas(CACHE_LINE) atomic_uint epoch;
    alignas(CACHE_LINE) atomic_uint pending;
    alignas(CACHE_LINE) atomic_uint sleepers; /* workers asleep, or about to be, on epoch */
    atomic_uint caller_sleeps;
    worker workers[]; /* n_threads - 1 */
};

/* --- Waiting for a word to change --- */

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* yield is a no-op on most cores */
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Returns 1 when *word stopped being `old` within the time worth spinning. */
static int spin_while(const atomic_uint *word, unsigned old) {
    const int64_t start = now_ns();
    do {
        for (int i = 0; i < PAUSES_PER_CLOCK; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != old)
                return 1;
            pause_cpu();
        }
    } while (now_ns() - start < SPIN_NS);
    return 0;
}

/* Sleep unless *word is no longer `old`. May return early: the caller looks again. */
static void sleep_while(bn_pool *pool, atomic_uint *word, unsigned old) {
#ifdef BN_FUTEX
    (void)pool;
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
#else
    pthread_mutex_lock(&pool->mutex);
    if (atomic_load(word) == old)
        pthread_cond_wait(&pool->changed, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
#endif
}

static void wake_all(bn_pool *pool, atomic_uint *word) {
#ifdef BN_FUTEX
    (void)pool;
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
#endif
}

/* --- The two sides of a run ---
 *
 * Who sleeps first announces it, then looks at the word; who changes the word then looks for the
 * announcement. Both pairs are sequentially consistent, so one of the two sees the other. */

static unsigned await_epoch(bn_pool *pool, unsigned seen) {
    if (!pool->spin || !spin_while(&pool->epoch, seen)) {
        atomic_fetch_add(&pool->sleepers, 1);
        while (atomic_load(&pool->epoch) == seen)
            sleep_while(pool, &pool->epoch, seen);
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
        wake_all(pool, &pool->epoch);
}

/* Of those who ask for a worker's share of an epoch, one gets it. All earlier ones are taken. */
static int claim_share(worker *w, unsigned epoch) {
    unsigned before = epoch - 1;
    return atomic_compare_exchange_strong(&w->claimed, &before, epoch);
}

static void finish_share(bn_pool *pool) {
    if (atomic_fetch_sub(&pool->pending, 1) == 1 && atomic_load(&pool->caller_sleeps))
        wake_all(pool, &pool->pending);
}

static void do_unclaimed_shares(bn_pool *pool) {
    const unsigned epoch = atomic_load_explicit(&pool->epoch, memory_order_relaxed);
    for (int32_t i = 0; i < pool->n_started; i++)
        if (claim_share(&pool->workers[i], epoch)) {
            pool->task(pool->context, pool->workers[i].index, pool->n_threads);
            atomic_fetch_sub(&pool->pending, 1);
        }
}

static void await_workers(bn_pool *pool) {
    unsigned left;
    while ((left = atomic_load_explicit(&pool->pending, memory_order_acquire)) != 0) {
        if (pool->spin && spin_while(&pool->pending, left))
            continue;
        atomic_store(&pool->caller_sleeps, 1);
        if (atomic_load(&pool->pending) == left)
            sleep_while(pool, &pool->pending, left);
        atomic_store(&pool->caller_sleeps, 0);
    }
}

static void *worker_main(void *argument) {
    worker *self = argument;
    bn_pool *pool = self->pool;
    unsigned seen = 0;
    for (;;) {
        seen = await_epoch(pool, seen);
        if (!claim_share(self, seen))
            continue;
        if (pool->task == NULL)
            return NULL;
        pool->task(pool->context, self->index, pool->n_threads);
        finish_share(pool);
    }
}

void bn_pool_run(bn_pool *pool, bn_task task, void *context) {
    if (pool->n_started == 0) { /* a pool of one, or a forked child: all shares are the caller's */
        for (int32_t i = 0; i < pool->n_threads; i++)
            task(context, i, pool->n_threads);
        return;
    }
    start_epoch(pool, task, context);
    task(context, 0, pool->n_threads);
    do_unclaimed_shares(pool);
    await_workers(pool);
}

/* --- fork ---
 *
 * A child has the memory of the pools but none of their threads, and a lock may be held by a
 * thread that is not there. So the process knows its pools, and a child mends them. */

static void init_locks(bn_pool *pool) {
    pthread_mutex_init(&pool->turn, NULL);
#ifndef BN_FUTEX
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
#endif
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
    if (pools != NULL)
        pools->previous = pool;
    pools = pool;
    pthread_mutex_unlock(&pools_lock);
}

static void unregister_pool(bn_pool *pool) {
    pthread_mutex_lock(&pools_lock);
    if (pool->next != NULL)
        pool->next->previous = pool->previous;
    if (pool->previous != NULL)
        pool->previous->next = pool->next;
    else
        pools = pool->next;
    pthread_mutex_unlock(&pools_lock);
}

/* --- Life --- */

/* Workers take no signals, so that Ctrl-C reaches the program's own threads; but for faults,
 * which belong to the thread that makes them. */
static int start_worker(worker *self) {
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
    if (n_threads < 1 || n_threads > MAX_THREADS || out == NULL)
        return BN_ERR_ARGUMENT;
    size_t size = sizeof(bn_pool) + (size_t)(n_threads - 1) * sizeof(worker);
    size = (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    bn_pool *pool = aligned_alloc(CACHE_LINE, size);
    if (pool == NULL)
        return BN_ERR_MEMORY;
    *pool = (bn_pool){.n_threads = n_threads, .spin = n_threads <= bn_usable_cpus()};
    init_locks(pool);
    register_pool(pool);
    while (pool->n_started < n_threads - 1) {
        worker *next = &pool->workers[pool->n_started];
        next->pool = pool;
        next->index = pool->n_started + 1;
        atomic_init(&next->claimed, 0);
        if (start_worker(next) != 0) {
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
    for (int32_t i = 0; i < pool->n_started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    pthread_mutex_destroy(&pool->turn);
#ifndef BN_FUTEX
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->mutex);
#endif
    free(pool);
}

int32_t bn_pool_threads(const bn_pool *pool) {
    return pool->n_threads;
}

void bn_pool_lock(bn_pool *pool) {
    pthread_mutex_lock(&pool->turn);
}

void bn_pool_unlock(bn_pool *pool) {
    pthread_mutex_unlock(&pool->turn);
}

void bn_share(size_t n, int32_t thread, int32_t n_threads, size_t *first, size_t *last) {
    const size_t i = (size_t)thread, parts = (size_t)n_threads;
    const size_t each = n / parts, more = n % parts; /* the first `more` parts have one extra */
    *first = each * i + (i < more ? i : more);
    *last = *first + each + (i < more ? 1 : 0);
}
