/* SPDX-License-Identifier: MIT
 *
 * wait.h: waiting for a word to change: spinning, and sleeping on a futex or, elsewhere, on a
 * condition variable. For threads.c only.
 */
#ifndef BITNET_WAIT_H
#define BITNET_WAIT_H

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "clock.h"

#if defined(__linux__) && !defined(BN_NO_FUTEX)
#define BN_FUTEX 1
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { BN_SPIN_NS = 80000, BN_PAUSES_PER_CLOCK = 32 };

/* What sleepers need besides the word. */
typedef struct bn_waiting {
#ifdef BN_FUTEX
    char nothing;
#else
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} bn_waiting;

static inline void bn_waiting_init(bn_waiting *w) {
#ifdef BN_FUTEX
    (void)w;
#else
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->changed, NULL);
#endif
}

static inline void bn_waiting_destroy(bn_waiting *w) {
#ifdef BN_FUTEX
    (void)w;
#else
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->mutex);
#endif
}

static inline void bn_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* yield is a no-op on most cores */
#endif
}

/* Spins for at most about BN_SPIN_NS while *word is `old`. Returns 1 if it changed. */
static inline int bn_spin_while(const atomic_uint *word, unsigned old) {
    const int64_t start = bn_nanoseconds();
    do {
        for (int i = 0; i < BN_PAUSES_PER_CLOCK; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != old)
                return 1;
            bn_pause();
        }
    } while (bn_nanoseconds() - start < BN_SPIN_NS);
    return 0;
}

/* Sleepers are in 32 groups, one per bit, so that not all have to be woken. */
#define BN_EVERYONE UINT32_MAX

/* Sleeps, if *word is `old`, until one of these groups is woken. May return early: the caller
 * checks the word again. */
static inline void bn_sleep_while(bn_waiting *w, atomic_uint *word, unsigned old, uint32_t groups) {
#ifdef BN_FUTEX
    (void)w;
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, old, NULL, NULL, groups);
#else
    (void)groups;
    pthread_mutex_lock(&w->mutex);
    if (atomic_load(word) == old)
        pthread_cond_wait(&w->changed, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
#endif
}

static inline void bn_wake(bn_waiting *w, atomic_uint *word, uint32_t groups) {
#ifdef BN_FUTEX
    (void)w;
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, groups);
#else
    (void)word, (void)groups;
    pthread_mutex_lock(&w->mutex);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
#endif
}

#endif
