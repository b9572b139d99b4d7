/* SPDX-License-Identifier: MIT
 *
 * passes.c: passes of a model, and between them a look at the limits of the machine, every few
 * milliseconds: on a shared machine both move together. Started by passes.py.
 *
 *     passes MODEL decode TOKENS SECONDS THREADS BATCH     one after another, from an empty context
 *     passes MODEL prefill TOKENS SECONDS THREADS BATCH    of one prompt
 *     passes MODEL embed TEXTS SECONDS THREADS BATCH       of 128 tokens each, together
 *
 * Prints what the model is, then of each pass its seconds, gigabytes read and int8 multiply-adds
 * (1e9) a second beside it.
 */
#define _GNU_SOURCE /* clock_gettime, posix_memalign */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bitnet_runtime.h"
#include "kernels/limits.h"

enum { TEXT = 128, LOOK = 32 << 20, LOOKS = 40, BURST = 4000 };

static const size_t BUFFER = (size_t)LOOKS * LOOK; /* too much for a cache */

typedef struct bench {
    bn_model *model;
    bn_model_info info;
    bn_session **sessions;
    int32_t n, n_sessions, n_ctx; /* tokens or texts of a pass; tokens of a session */
    int32_t *tokens;              /* [n_ctx] */
    const int32_t **texts;
    int32_t *lengths;
    float *vectors;
} bench;

static void ok(bn_status status, const char *detail) {
    if (status == BN_OK)
        return;
    fprintf(stderr, "error: %s\n", *detail ? detail : bn_status_text(status));
    exit(1);
}

static void *some(size_t count, size_t size) {
    void *p = calloc(count, size);
    if (!p)
        ok(BN_ERR_MEMORY, "");
    return p;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Rewinds when the context is full, which costs nothing. */
static void decode(bench *b) {
    bn_session *s = *b->sessions;
    for (int32_t i = 0; i < b->n; i++) {
        int32_t token = b->tokens[0];
        if (bn_session_position(s) == b->n_ctx)
            ok(bn_session_rewind(s, 0), "");
        if (bn_session_position(s) > 0)
            ok(bn_session_sample(s, NULL, &token), "");
        ok(bn_session_append(s, &token, 1, BN_LOGITS_LAST, NULL), "");
    }
}

static void prefill(bench *b) {
    ok(bn_session_rewind(*b->sessions, 0), "");
    ok(bn_session_append(*b->sessions, b->tokens, b->n,
                         b->info.has_head ? BN_LOGITS_LAST : BN_LOGITS_NONE, NULL),
       "");
}

static void embed(bench *b) {
    for (int32_t i = 0; i < b->n; i++)
        ok(bn_session_rewind(b->sessions[i], 0), "");
    ok(bn_embed_batch(b->sessions, b->texts, b->lengths, b->n, BN_POOL_MEAN, b->vectors), "");
}

static const struct {
    const char *name;
    void (*pass)(bench *b);
} kinds[] = {{"decode", decode}, {"prefill", prefill}, {"embed", embed}};

static void open_all(bench *b, const char *path, int together, int32_t threads, int32_t batch) {
    char detail[BN_DETAIL_SIZE] = "";
    uint32_t random = 1;
    ok(bn_model_open(path, &(bn_load_options){.threads = threads}, &b->model, detail), detail);
    ok(bn_model_get_info(b->model, &b->info), "");
    b->n_sessions = together ? b->n : 1;
    b->n_ctx = together ? TEXT : b->n > 256 ? b->n : 256;
    b->tokens = some((size_t)b->n_ctx, sizeof *b->tokens);
    for (int32_t i = 0; i < b->n_ctx; i++)
        b->tokens[i] = (int32_t)((random = random * 1664525u + 1013904223u) >> 8) %
                       (int32_t)b->info.vocab_size;
    b->sessions = some((size_t)b->n_sessions, sizeof *b->sessions);
    b->texts = some((size_t)b->n_sessions, sizeof *b->texts);
    b->lengths = some((size_t)b->n_sessions, sizeof *b->lengths);
    b->vectors = some((size_t)b->n_sessions * b->info.dim, sizeof *b->vectors);
    for (int32_t i = 0; i < b->n_sessions; i++) {
        ok(bn_session_new(b->model, &(bn_session_options){.n_ctx = b->n_ctx, .batch = batch},
                          &b->sessions[i]),
           "");
        b->texts[i] = b->tokens;
        b->lengths[i] = TEXT;
    }
}

static void run(bench *b, void (*pass)(bench *), double seconds, bn_pool *pool,
                const uint8_t *buffer) {
    bn_kernels kernels;
    size_t at = 0;
    bn_kernels_select(&kernels, b->info.isa);
    pass(b); /* the file is in memory, and its pages are mapped */
    for (const double end = now() + seconds; now() < end; at = (at + LOOK) % BUFFER) {
        const double begin = now();
        pass(b);
        const double took = now() - begin;
        const double read = bn_read_rate(pool, buffer + at, LOOK);
        bn_int8_rate(&kernels, pool, BURST / 10); /* its threads wake up */
        printf("%.9f %.4f %.3f\n", took, 1e-9 * read,
               1e-9 * bn_int8_rate(&kernels, pool, BURST));
    }
}

int main(int argc, char **argv) {
    bench b = {0};
    size_t kind = 0;
    bn_pool *pool;
    void *buffer = NULL;
    while (argc == 7 && kind < 3 && strcmp(argv[2], kinds[kind].name) != 0)
        kind++;
    if (argc != 7 || kind == 3) {
        fprintf(stderr, "usage: passes MODEL decode|prefill|embed COUNT SECONDS THREADS BATCH\n");
        return 2;
    }
    b.n = atoi(argv[3]);
    open_all(&b, argv[1], kinds[kind].pass == embed, atoi(argv[5]), atoi(argv[6]));
    ok(bn_pool_new(b.info.threads, &pool), "");
    if (posix_memalign(&buffer, 1 << 21, BUFFER) != 0)
        ok(BN_ERR_MEMORY, "");
    memset(buffer, 1, BUFFER);
    printf("%s %" PRId32 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", b.info.isa,
           b.info.threads, b.info.ternary_weights, b.info.bytes_per_token, b.info.macs_per_token,
           b.info.kv_bytes_per_token[BN_KV_F16]);
    run(&b, kinds[kind].pass, atof(argv[4]), pool, buffer);
    bn_pool_free(pool);
    for (int32_t i = 0; i < b.n_sessions; i++)
        bn_session_free(b.sessions[i]);
    bn_model_close(b.model);
    free(buffer), free(b.tokens), free(b.sessions), free(b.texts), free(b.lengths);
    free(b.vectors);
    return 0;
}
