/* SPDX-License-Identifier: MIT
 *
 * threads.h: a small pool. The caller is thread 0 and works too. Between runs workers spin
 * for a moment, because the next run of a decode step comes in microseconds, then sleep.
 */
#ifndef BITNET_THREADS_H
#define BITNET_THREADS_H

#include "bitnet_runtime.h"

typedef struct bn_pool bn_pool; /* NULL: the caller alone */

/* Does items [first, end) of a run on a thread of the pool, 0..n_threads-1: memory that belongs to
 * that number is the task's alone. */
typedef void (*bn_task)(void *context, int32_t thread, size_t first, size_t end);

/* n_threads in 1..256. Fails with BN_ERR_MEMORY or BN_ERR_THREAD, leaving nothing behind. */
bn_status bn_pool_new(int32_t n_threads, bn_pool **pool);
void bn_pool_free(bn_pool *pool); /* NULL is allowed */
int32_t bn_pool_threads(const bn_pool *pool);
int32_t bn_pool_running(const bn_pool *pool); /* those there are: in a forked child, 1 */

/* Do items 0..items-1, fewer than 2³², in parts of at most `most` consecutive ones, and return when
 * all are done; what the task wrote is visible. A thread has the same contiguous share in every run
 * of as many items, so its caches keep what they can, and then helps those that are slower. One
 * caller at a time: take bn_pool_lock around a group of runs. */
void bn_pool_run(bn_pool *pool, size_t items, size_t most, bn_task task, void *context);

/* Whoever asks first has the pool first: who gives it back and asks again comes behind all who
 * wait. */
void bn_pool_lock(bn_pool *pool);
void bn_pool_unlock(bn_pool *pool);

/* The share [*first, *end) of a thread in n items: sizes differ by <= 1. */
void bn_share(size_t n, int32_t thread, int32_t n_threads, size_t *first, size_t *end);

#endif
