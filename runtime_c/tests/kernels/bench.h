/* SPDX-License-Identifier: MIT
 *
 * bench.h: speed of a kernel on one thread, compared with the limits of the machine and with scalar
 * code.
 */
#ifndef BITNET_TESTS_BENCH_H
#define BITNET_TESTS_BENCH_H

#include "check.h"
#include "kernels/kernels.h"

#include <time.h>

typedef struct bench {
    const bn_kernels *k, *scalar;
    uint8_t *weights; /* BENCH_BYTES, far more than any cache */
    float *x, *y;     /* BENCH_FLOATS each */
    int8_t *q;
    int32_t *acc;
    void *scratch;
    size_t rows, cols, tokens, at; /* of the call; offset of its weights */
    int32_t type;                  /* bn_kv_type */
} bench;

enum { BENCH_BYTES = 1 << 28, BENCH_FLOATS = 1 << 19, BENCH_PANELS = 8 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* not the time of other processes */
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of one call, the median of five runs of at least `span` seconds. */
static double time_call(void (*call)(bench *), bench *b, double span) {
    double run[5];
    call(b);
    for (int i = 0; i < 5; i++) {
        double begin = seconds(), now = begin;
        uint64_t calls = 0;
        for (uint64_t batch = 1; now - begin < span; batch *= 2) {
            for (uint64_t n = 0; n < batch; n++)
                call(b);
            calls += batch;
            now = seconds();
        }
        double value = (now - begin) / (double)calls;
        int j = i;
        for (; j > 0 && run[j - 1] > value; j--)
            run[j] = run[j - 1];
        run[j] = value;
    }
    return run[2];
}

/* The next `bytes` of the weights, which cycle through more than any cache holds. */
static const void *next_weights(bench *b, size_t bytes) {
    if (b->at + bytes > BENCH_BYTES)
        b->at = 0;
    const void *weights = b->weights + b->at;
    b->at += bytes;
    return weights;
}

/* Times a kernel and prints a line. One call has `work` multiply-adds (or elements) and reads
 * `bytes` of weights (or of input). */
static void bench_line(bench *b, const char *name, void (*call)(bench *), double work,
                       double bytes) {
    const bn_kernels *tier = b->k;
    const double fast = time_call(call, b, 0.02);
    b->k = b->scalar;
    const double slow = time_call(call, b, 0.002);
    b->k = tier;
    printf("%-15s %6zu x %-5zu x %-4zu %9.2f us %9.2f G/s %9.2f GB/s %7.1f x scalar\n", name,
           b->rows, b->cols, b->tokens, fast * 1e6, work / fast * 1e-9, bytes / fast * 1e-9,
           slow / fast);
}

/* A vector of the residual stream's width; bytes: read per element. */
static void time_vector(bench *b, const char *name, void (*call)(bench *), double bytes) {
    b->rows = b->tokens = 1, b->cols = 2560;
    bench_line(b, name, call, (double)b->cols, bytes * (double)b->cols);
}

static bench bench_new(const bn_kernels *tier, const bn_kernels *scalar) {
    bench b = {.k = tier,
               .scalar = scalar,
               .weights = aligned_alloc(64, BENCH_BYTES),
               .x = aligned_alloc(64, BENCH_FLOATS * sizeof(float)),
               .y = aligned_alloc(64, BENCH_FLOATS * sizeof(float)),
               .q = aligned_alloc(64, 1 << 20),
               .acc = aligned_alloc(64, 1 << 20),
               .scratch = aligned_alloc(64, bn_lookup_bytes(2560))};
    CHECK(b.weights && b.x && b.y && b.q && b.acc && b.scratch);
    memset(b.scratch, 0, bn_lookup_bytes(2560));
    uint64_t random = 1;
    for (size_t i = 0; i < BENCH_BYTES; i++) { /* codes 0, 1, 2; finite as halves */
        random = random * 6364136223846793005u + 1442695040888963407u;
        const uint8_t byte = (uint8_t)(random >> 56);
        b.weights[i] = (uint8_t)(byte - (byte & byte >> 1 & 0x55));
    }
    random = 1;
    for (size_t i = 0; i < BENCH_FLOATS; i++)
        b.x[i] = b.y[i] = check_float(&random);
    for (size_t i = 0; i < 1 << 20; i++)
        b.q[i] = (int8_t)((int)check_below(&random, 255) - 127);
    return b;
}

static void bench_free(bench *b) {
    free(b->weights), free(b->x), free(b->y), free(b->q), free(b->acc), free(b->scratch);
}

static void call_read(bench *b) {
    const uint64_t *p = (const uint64_t *)(const void *)b->weights;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < BENCH_BYTES / sizeof *p; i += 8)
        for (size_t j = 0; j < 8; j++)
            sum[j] ^= p[i + j];
    for (size_t j = 0; j < 8; j++)
        b->acc[j] = (int32_t)sum[j];
}
static void call_peak(bench *b) {
    b->k->products.int8_peak(1000, b->acc);
}

static void bench_limits(bench *b) {
    int32_t sink = 0;
    const double macs = (double)b->k->products.int8_peak(1000, &sink);
    printf("limits of one thread: %.1f GMAC/s of int8, %.2f GB/s read\n",
           macs / time_call(call_peak, b, 0.05) * 1e-9,
           (double)BENCH_BYTES / time_call(call_read, b, 0.05) * 1e-9);
}

#endif
