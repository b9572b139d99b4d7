/* SPDX-License-Identifier: MIT
 *
 * kernels_bench.h: what each kernel does in a second on one thread, beside what the machine could
 * do at best and what scalar code does.
 */
#ifndef BITNET_KERNELS_BENCH_H
#define BITNET_KERNELS_BENCH_H

#include "check.h"
#include "kernels/kernels.h"

#include <time.h>

typedef struct bench {
    const bn_kernels *k;
    uint8_t *weights; /* BENCH_BYTES, far more than any cache */
    float *x, *y;     /* BENCH_FLOATS each */
    int8_t *q;
    int32_t *acc;
    void *scratch;
    size_t rows, cols, tokens, at; /* of the call; where in the weights it is */
} bench;

enum { BENCH_BYTES = 1 << 28, BENCH_FLOATS = 1 << 19, BENCH_PANELS = 8 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* what others run does not count */
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

/* The next 8 panels of a matrix that does not fit in a cache, as linear.c calls it. */
static void call_matmul(bench *b, void (*matmul)(const bn_matmul *), size_t tile_k) {
    const size_t k_tiles = (b->cols + tile_k - 1) / tile_k;
    const size_t bytes = BENCH_PANELS * k_tiles * BN_TILE_BYTES;
    if (b->at + bytes > BENCH_BYTES)
        b->at = 0;
    const bn_matmul m = {.acc = b->acc,
                         .acc_stride = BENCH_PANELS * BN_PANEL,
                         .tiles = b->weights + b->at,
                         .panel_stride = k_tiles * BN_TILE_BYTES,
                         .panels = BENCH_PANELS,
                         .k_tiles = k_tiles,
                         .q = b->q,
                         .q_stride = bn_q_row(b->cols),
                         .tokens = b->tokens};
    matmul(&m);
    b->at += bytes;
}

static void call_ternary(bench *b) {
    call_matmul(b, b->k->ternary_matmul, BN_TERNARY_TILE_K);
}
static void call_trit(bench *b) {
    call_matmul(b, b->k->trit_matmul, BN_TRIT_TILE_K);
}
/* b->rows rows of one matrix, as linear.c calls it. */
static void call_lookup(bench *b) {
    const size_t k_tiles = b->cols / BN_TERNARY_TILE_K, bytes = b->rows * b->cols / 4;
    if (b->at + bytes > BENCH_BYTES)
        b->at = 0;
    const bn_matmul m = {.acc = b->acc,
                         .acc_stride = b->rows,
                         .tiles = b->weights + b->at,
                         .panel_stride = k_tiles * BN_TILE_BYTES,
                         .panels = b->rows / BN_PANEL,
                         .k_tiles = k_tiles,
                         .q = b->q,
                         .q_stride = bn_q_row(b->cols),
                         .tokens = b->tokens};
    b->k->ternary_lookup(&m, b->scratch);
    b->at += bytes;
}
static void call_grouped(bench *b) {
    const size_t k_tiles = b->cols / BN_TERNARY_TILE_K;
    const size_t scales = b->cols / BN_SCALE_GROUP_K * BN_PANEL * sizeof(uint16_t);
    const size_t bytes = BENCH_PANELS * (k_tiles * BN_TILE_BYTES + scales);
    if (b->at + bytes > BENCH_BYTES)
        b->at = 0;
    const uint8_t *tiles = b->weights + b->at;
    b->k->ternary_grouped(&(bn_grouped){
        .y = b->y,
        .y_stride = BENCH_PANELS * BN_PANEL,
        .tiles = tiles,
        .scales = (const uint16_t *)(const void *)(tiles + BENCH_PANELS * k_tiles * BN_TILE_BYTES),
        .panels = BENCH_PANELS,
        .k_tiles = k_tiles,
        .q = b->q,
        .q_stride = bn_q_row(b->cols),
        .q_sums = b->acc,
        .q_sums_stride = b->cols / BN_SCALE_GROUP_K,
        .tokens = b->tokens});
    b->at += bytes;
}
/* One line of five, unevenly, of the next b->rows lines. */
static void call_lines(bench *b, void (*multiply)(const bn_lines *)) {
    uint32_t list[2048];
    size_t n = 0;
    for (; 5 * (n + 1) <= b->rows; n++)
        list[n] = (uint32_t)(5 * n + n * n % 5);
    const size_t line_bytes = b->cols / 4;
    if (b->at + b->rows * line_bytes > BENCH_BYTES)
        b->at = 0;
    multiply(&(bn_lines){.acc = b->acc,
                         .lines = b->weights + b->at,
                         .line_bytes = line_bytes,
                         .codes = b->cols,
                         .list = list,
                         .n = n / 4 * 4,
                         .q = b->q});
    b->at += b->rows * line_bytes;
}
static void call_rows(bench *b) {
    call_lines(b, b->k->ternary_rows);
}
static void call_columns(bench *b) {
    call_lines(b, b->k->ternary_columns);
}
static void call_int8(bench *b) {
    const size_t bytes = b->rows * b->cols; /* cols: a multiple of BN_INT8_UNIT */
    if (b->at + bytes > BENCH_BYTES)
        b->at = 0;
    b->k->int8_rows(&(bn_int8_rows){.acc = b->acc,
                                    .acc_stride = b->rows,
                                    .codes = (const int8_t *)b->weights + b->at,
                                    .row_bytes = b->cols,
                                    .rows = b->rows,
                                    .q = b->q,
                                    .q_stride = bn_q_row(b->cols),
                                    .q_sums = b->acc, /* any numbers */
                                    .tokens = b->tokens});
    b->at += bytes;
}
static void call_peak(bench *b) {
    b->k->int8_peak(1000, b->acc);
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
static void call_f32(bench *b) {
    b->k->f32_matmul(b->y, b->rows, (const float *)(const void *)b->weights, b->rows, b->cols, b->x,
                     b->cols, b->tokens);
}
static void call_f16(bench *b) {
    b->k->f16_matmul(b->y, b->rows, (const uint16_t *)(const void *)b->weights, b->rows, b->cols,
                     b->x, b->cols, b->tokens);
}
static void call_quantize(bench *b) {
    b->k->quantize(b->q, b->acc, b->x, b->cols, b->cols);
}
static void call_rms_norm(bench *b) {
    b->k->rms_norm(b->y, b->x, b->x + b->cols, b->cols, 1e-5f);
}
static void call_max(bench *b) {
    b->y[0] = b->k->max(b->x, b->cols);
}
static void call_exp_sum(bench *b) {
    b->k->exp_sum(b->y, b->cols, 0.5f);
}
static void call_silu(bench *b) {
    b->k->silu_gate(b->y, b->x, b->x + b->cols, b->cols);
}
static void call_gelu(bench *b) {
    b->k->gelu_gate(b->y, b->x, b->x + b->cols, b->cols);
}
static void call_relu2(bench *b) {
    b->k->relu2_gate(b->y, b->x, b->x + b->cols, b->cols);
}
static void call_qk(bench *b) {
    b->k->qk_f16(b->y, b->rows, b->x, b->tokens, (const uint16_t *)(const void *)b->weights,
                 b->cols, b->rows / BN_LANES);
}
static void call_pv(bench *b) {
    b->k->pv_f16(b->y, b->x, b->rows, b->tokens, (const uint16_t *)(const void *)b->weights,
                 b->cols, b->rows);
}
static void call_qk_int8(bench *b) {
    b->k->qk_int8(b->y, b->rows, b->q, b->x, b->tokens, (const int8_t *)b->weights, b->x + 16,
                  b->cols, b->rows / BN_LANES);
}
static void call_pv_int8(bench *b) {
    b->k->pv_int8(b->y, b->x, b->rows, b->tokens, (const int8_t *)b->weights, b->cols, b->rows);
}
static void call_narrow(bench *b) {
    b->k->f32_to_f16((uint16_t *)(void *)b->y, b->x, b->cols);
}
static void call_widen(bench *b) {
    b->k->f16_to_f32(b->y, (const uint16_t *)(const void *)b->weights, b->cols);
}
static void call_crc(bench *b) {
    b->acc[0] = (int32_t)b->k->crc32(0, b->weights, b->rows);
}

/* `work` multiply-adds (or elements) and `bytes` of weights (or of input) in one call. */
static void bench_line(bench *b, const bn_kernels *scalar, const char *name, void (*call)(bench *),
                       double work, double bytes) {
    const bn_kernels *tier = b->k;
    const double fast = time_call(call, b, 0.02);
    b->k = scalar;
    const double slow = time_call(call, b, 0.002);
    b->k = tier;
    printf("%-15s %6zu x %-5zu x %-4zu %9.2f us %9.2f G/s %9.2f GB/s %7.1f x scalar\n", name,
           b->rows, b->cols, b->tokens, fast * 1e6, work / fast * 1e-9, bytes / fast * 1e-9,
           slow / fast);
}

static void bench_matmuls(bench *b, const bn_kernels *scalar) {
    static const size_t cols[] = {2560, 6912}, tokens[] = {1, 2, 3, 4, 6, 8, 12, 16, 32, 128};
    for (size_t c = 0; c < 2; c++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            b->rows = BENCH_PANELS * BN_PANEL, b->cols = cols[c], b->tokens = tokens[t], b->at = 0;
            const double weights = (double)(b->rows * b->cols);
            const double macs = weights * (double)b->tokens;
            bench_line(b, scalar, "ternary_matmul", call_ternary, macs, weights / 4);
            bench_line(b, scalar, "trit_matmul", call_trit, macs, weights / 5);
            bench_line(b, scalar, "ternary_grouped", call_grouped, macs,
                       weights / 4 + weights / 64);
            if (c == 0 && (t < 2 || tokens[t] == 128))
                bench_line(b, scalar, "int8_rows", call_int8, macs, weights);
        }
}

static void bench_lookup(bench *b, const bn_kernels *scalar) {
    b->tokens = b->k->lookup_tokens, b->at = 0;
    for (b->rows = 640; b->rows <= 2560 && b->tokens > 0; b->rows *= 2)
        for (b->cols = 2560; b->cols <= 6912; b->cols += 4352) {
            const double weights = (double)(b->rows * b->cols);
            bench_line(b, scalar, "ternary_lookup", call_lookup, weights * (double)b->tokens,
                       weights / 4);
        }
}

/* The lines of one layer of 6912 neurons. */
static void bench_lines(bench *b, const bn_kernels *scalar) {
    b->rows = 6912, b->cols = 2560, b->tokens = 1, b->at = 0;
    const double listed = (double)(b->rows / 20 * 4 * b->cols);
    bench_line(b, scalar, "ternary_rows", call_rows, listed, listed / 4);
    bench_line(b, scalar, "ternary_columns", call_columns, listed, listed / 4);
}

static void bench_floats(bench *b, const bn_kernels *scalar) {
    b->rows = 128, b->cols = 2560;
    for (size_t tokens = 1; tokens <= 16; tokens *= 4) {
        b->tokens = tokens;
        const double w = (double)(b->rows * b->cols), macs = w * (double)tokens;
        bench_line(b, scalar, "f32_matmul", call_f32, macs, 4 * w);
        bench_line(b, scalar, "f16_matmul", call_f16, macs, 2 * w);
    }
    b->rows = b->tokens = 1;
    const double n = (double)b->cols;
    bench_line(b, scalar, "quantize", call_quantize, n, 4 * n);
    bench_line(b, scalar, "rms_norm", call_rms_norm, n, 8 * n);
    bench_line(b, scalar, "max", call_max, n, 4 * n);
    bench_line(b, scalar, "exp_sum", call_exp_sum, n, 4 * n);
    bench_line(b, scalar, "silu_gate", call_silu, n, 8 * n);
    bench_line(b, scalar, "relu2_gate", call_relu2, n, 8 * n);
    bench_line(b, scalar, "gelu_gate", call_gelu, n, 8 * n);
    bench_line(b, scalar, "f32_to_f16", call_narrow, n, 4 * n);
    bench_line(b, scalar, "f16_to_f32", call_widen, n, 2 * n);
    b->rows = 256, b->cols = 128; /* keys of a chunk, head_dim */
    for (b->tokens = 1; b->tokens <= 4; b->tokens *= 2) {
        const double kv = (double)(b->rows * b->cols), macs = kv * (double)b->tokens;
        bench_line(b, scalar, "qk_f16", call_qk, macs, 2 * kv);
        bench_line(b, scalar, "pv_f16", call_pv, macs, 2 * kv);
        bench_line(b, scalar, "qk_int8", call_qk_int8, macs, kv);
        bench_line(b, scalar, "pv_int8", call_pv_int8, macs, kv);
    }
    b->rows = 1 << 18, b->cols = b->tokens = 1;
    bench_line(b, scalar, "crc32", call_crc, (double)b->rows, (double)b->rows);
}

static void bench_tier(const bn_kernels *tier, const bn_kernels *scalar) {
    bench b = {.k = tier,
               .weights = aligned_alloc(64, BENCH_BYTES),
               .x = aligned_alloc(64, BENCH_FLOATS * sizeof(float)),
               .y = aligned_alloc(64, BENCH_FLOATS * sizeof(float)),
               .q = aligned_alloc(64, 1 << 20),
               .acc = aligned_alloc(64, 1 << 20),
               .scratch = aligned_alloc(64, bn_lookup_bytes(2560))};
    CHECK(b.weights && b.x && b.y && b.q && b.acc && b.scratch);
    memset(b.scratch, 0, bn_lookup_bytes(2560));
    uint64_t random = 1;
    for (size_t i = 0; i < BENCH_BYTES; i++) { /* codes 0, 1, 2, and finite as halves */
        random = random * 6364136223846793005u + 1442695040888963407u;
        const uint8_t byte = (uint8_t)(random >> 56);
        b.weights[i] = (uint8_t)(byte - (byte & byte >> 1 & 0x55));
    }
    random = 1;
    for (size_t i = 0; i < BENCH_FLOATS; i++)
        b.x[i] = b.y[i] = check_float(&random);
    for (size_t i = 0; i < 1 << 20; i++)
        b.q[i] = (int8_t)((int)check_below(&random, 255) - 127);

    int32_t sink = 0;
    const double macs = (double)tier->int8_peak(1000, &sink);
    printf("limits of one thread: %.1f GMAC/s of int8, %.2f GB/s read\n",
           macs / time_call(call_peak, &b, 0.05) * 1e-9,
           BENCH_BYTES / time_call(call_read, &b, 0.05) * 1e-9);
    bench_matmuls(&b, scalar);
    bench_lookup(&b, scalar);
    bench_lines(&b, scalar);
    bench_floats(&b, scalar);
    free(b.weights), free(b.x), free(b.y), free(b.q), free(b.acc), free(b.scratch);
}

#endif
