/* SPDX-License-Identifier: MIT
 *
 * steal.h: work stealing: the items that a thread has left in a run, in one word. The thread takes
 * parts from the front; threads that have finished their own share steal parts from the back. So a
 * core that is slower, gets less memory bandwidth, or is taken by another program delays the run by
 * at most one part. For threads.c only.
 */
#ifndef BITNET_STEAL_H
#define BITNET_STEAL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef _Atomic uint64_t bn_items; /* first | end << 32 */

static inline void bn_deal(bn_items *share, size_t first, size_t end) {
    atomic_store_explicit(share, first | (uint64_t)end << 32, memory_order_relaxed);
}

/* Takes at most `most` items from the front or the back, fewer towards the end, so that all threads
 * finish together. Returns 0 if nothing is left. */
static inline int bn_take(bn_items *items, int at_front, size_t most, size_t *first, size_t *end) {
    uint64_t share = atomic_load_explicit(items, memory_order_relaxed), rest;
    do {
        const uint64_t begin = share & UINT32_MAX, stop = share >> 32;
        const uint64_t quarter = (stop - begin + 3) / 4, part = quarter < most ? quarter : most;
        if (part == 0)
            return 0;
        *first = at_front ? begin : stop - part;
        *end = *first + part;
        rest = at_front ? *end | stop << 32 : begin | (uint64_t)*first << 32;
    } while (!atomic_compare_exchange_weak_explicit(items, &share, rest, memory_order_relaxed,
                                                    memory_order_relaxed));
    return 1;
}

#endif
