/* SPDX-License-Identifier: MIT
 *
 * threads.h: a small thread pool. The caller is thread 0 and works too. Between runs workers spin
 * briefly, because the next run of a decode step comes within microseconds, then sleep.
 */
#ifndef BITNET_THREADS_H
#define BITNET_THREADS_H

#include "bitnet_runtime.h"

enum { BN_MOST_THREADS = 256 };

typedef struct bn_pool bn_pool; /* NULL: the caller alone */

/* Processes items [first, end) of a run on thread 0..n_threads-1 of the pool. No other call uses
 * memory reserved for that thread number at the same time. */
typedef void (*bn_task)(void *context, int32_t thread, size_t first, size_t end);

/* n_threads in 1..BN_MOST_THREADS. Fails with BN_ERR_MEMORY or BN_ERR_THREAD, leaving nothing
 * behind. */
bn_status bn_pool_new(int32_t n_threads, bn_pool **pool);
void bn_pool_free(bn_pool *pool); /* NULL is allowed */
int32_t bn_pool_threads(const bn_pool *pool);
int32_t bn_pool_running(const bn_pool *pool); /* threads that exist: in a forked child, 1 */

/* Processes items 0..items-1, fewer than 2³², in parts of at most `most` consecutive items, and
 * returns when all are done; everything the task wrote is then visible. A thread has the same
 * contiguous share in every run with the same number of items, which keeps its caches warm, and
 * then steals from slower threads. One caller at a time: hold bn_pool_lock around a group of
 * runs. */
void bn_pool_run(bn_pool *pool, size_t items, size_t most, bn_task task, void *context);

/* Callers get the lock in the order in which they ask: one that unlocks and locks again queues
 * behind all that wait. */
void bn_pool_lock(bn_pool *pool);
void bn_pool_unlock(bn_pool *pool);

/* The share [*first, *end) of a thread in n items; the sizes of shares differ by at most 1. */
void bn_share(size_t n, int32_t thread, int32_t n_threads, size_t *first, size_t *end);

#endif
