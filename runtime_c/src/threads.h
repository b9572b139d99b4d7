/* SPDX-License-Identifier: MIT
 *
 * threads.h: a small pool. The caller is thread 0 and works too. Between runs workers spin
 * for a moment, because the next run of a decode step comes in microseconds, then sleep.
 */
#ifndef BITNET_THREADS_H
#define BITNET_THREADS_H

#include "bitnet_runtime.h"

typedef struct bn_pool bn_pool;

/* Called once on each thread of the pool: thread 0..n_threads-1. */
typedef void (*bn_task)(void *context, int32_t thread, int32_t n_threads);

/* n_threads in 1..256. Fails with BN_ERR_MEMORY or BN_ERR_THREAD, leaving nothing behind. */
bn_status bn_pool_new(int32_t n_threads, bn_pool **pool);
void bn_pool_free(bn_pool *pool); /* NULL is allowed */
int32_t bn_pool_threads(const bn_pool *pool);

/* Run task on every thread and return when all are done; what they wrote is visible. One
 * caller at a time: take bn_pool_lock around a group of runs. */
void bn_pool_run(bn_pool *pool, bn_task task, void *context);

void bn_pool_lock(bn_pool *pool);
void bn_pool_unlock(bn_pool *pool);

/* The part [*first, *last) of n items that belongs to a thread: contiguous, sizes differ by <= 1.
 */
void bn_share(size_t n, int32_t thread, int32_t n_threads, size_t *first, size_t *last);

#endif
