/* SPDX-License-Identifier: MIT
 *
 * limits.c: measures the two hardware limits: memory read bandwidth and the int8 multiply-add rate.
 * The pool starts all threads within a microsecond or two, so the wall time of a run of
 * milliseconds is the time during which all of them work.
 */
#include "limits.h"

#include "bitnet_runtime.h"
#include "system/clock.h"
#include "system/floats.h"
#include "system/memory.h"
#include "system/pages.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { PASSES = 6 };

static double seconds_of(bn_pool *pool, size_t items, size_t most, bn_task task, void *context) {
    const double start = bn_seconds();
    bn_pool_run(pool, items, most, task, context);
    return bn_seconds() - start;
}

/* --- Reading --- */

enum { LINE = 64, BLOCK = BN_READ_UNIT, MOST_BLOCKS = 4096 };

typedef struct stream {
    const uint8_t *bytes;  /* [blocks][BLOCK] */
    _Atomic uint64_t sink; /* keeps the sums from being optimized away */
} stream;

/* Each thread writes the part it will read, which commits the pages on the thread's NUMA node. */
static void touch(void *context, int32_t thread, size_t first, size_t end) {
    uint8_t *bytes = context;
    memset(bytes + first * BLOCK, thread + 1, (end - first) * BLOCK);
}

/* One load per cache line: memory transfers whole lines, and with so few instructions execution
 * cannot be the bottleneck, whatever the compiler does. (On a Zen 5 core, summing every word in
 * 128-bit registers reached 33 GB/s; this loop and one of 512-bit loads both reached 40.) */
static void read_lines(void *context, int32_t thread, size_t first, size_t end) {
    stream *s = context;
    (void)thread;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = first; i < end; i++) {
        const uint8_t *block = s->bytes + i * BLOCK;
        a += block[0 * LINE];
        b += block[1 * LINE];
        c += block[2 * LINE];
        d += block[3 * LINE];
    }
    atomic_fetch_add_explicit(&s->sink, a + b + c + d, memory_order_relaxed);
}

double bn_read_rate(bn_pool *pool, const uint8_t *bytes, size_t size) {
    stream s = {.bytes = bytes};
    return (double)size / seconds_of(pool, size / BLOCK, MOST_BLOCKS, read_lines, &s);
}

bn_status bn_measure_read_bandwidth(int32_t threads, uint64_t bytes, double *gb_per_s) {
    BN_STANDARD_FLOATS;
    if (gb_per_s == NULL || threads < 1 || bytes < (uint64_t)BN_HUGE_PAGE ||
        bytes / BLOCK > UINT32_MAX) /* most items of a run */
        return BN_ERR_ARGUMENT;
    bn_pool *pool;
    const bn_status status = bn_pool_new(threads, &pool);
    if (status != BN_OK)
        return status;
    size_t size = (size_t)bytes / BN_HUGE_PAGE * BN_HUGE_PAGE;
    uint8_t *buffer =
        bn_memory_left("", BN_MEMORY_OWN, size).bytes < size ? NULL : bn_pages_new(&size);
    if (buffer == NULL) {
        bn_pool_free(pool);
        return BN_ERR_MEMORY;
    }
    bn_pool_run(pool, size / BLOCK, MOST_BLOCKS, touch, buffer);
    double best = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        const double rate = bn_read_rate(pool, buffer, size);
        best = rate > best ? rate : best;
    }
    free(buffer);
    bn_pool_free(pool);
    *gb_per_s = best * 1e-9;
    return BN_OK;
}

/* --- int8 multiply-adds --- */

enum { ROUNDS = 1000 }; /* per item: takes microseconds */

typedef struct burst {
    const bn_kernels *kernels;
    _Atomic uint64_t macs; /* by all threads */
    _Atomic int32_t sink;
} burst;

static void multiply(void *context, int32_t thread, size_t first, size_t end) {
    burst *b = context;
    int32_t sink = thread;
    const uint64_t macs = b->kernels->products.int8_peak((end - first) * ROUNDS, &sink);
    atomic_fetch_add_explicit(&b->macs, macs, memory_order_relaxed);
    atomic_fetch_add_explicit(&b->sink, sink, memory_order_relaxed);
}

double bn_int8_rate(const bn_kernels *kernels, bn_pool *pool, size_t items) {
    burst b = {.kernels = kernels};
    const double took = seconds_of(pool, items, items, multiply, &b);
    return (double)atomic_load(&b.macs) / took;
}

bn_status bn_measure_int8_peak(const char *isa, int32_t threads, double *gmac_per_s) {
    BN_STANDARD_FLOATS;
    bn_kernels kernels;
    if (gmac_per_s == NULL || threads < 1 || !bn_kernels_select(&kernels, isa))
        return BN_ERR_ARGUMENT;
    bn_pool *pool;
    const bn_status status = bn_pool_new(threads, &pool);
    if (status != BN_OK)
        return status;
    burst b = {.kernels = &kernels};
    size_t items = (size_t)threads;
    double took = 0;
    while (took < 0.1) { /* seconds: enough items to time, and warm-up for the clock rate */
        items *= took < 0.01 ? 4 : 2;
        took = seconds_of(pool, items, items, multiply, &b);
    }
    double best = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        const double rate = bn_int8_rate(&kernels, pool, items);
        best = rate > best ? rate : best;
    }
    bn_pool_free(pool);
    *gmac_per_s = best * 1e-9;
    return BN_OK;
}
