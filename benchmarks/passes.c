/* SPDX-License-Identifier: MIT
 *
 * passes.c: times passes of a model and, between them, the limits of the machine, every few
 * milliseconds: on a shared machine both vary together. Started by passes.py.
 *
 *     passes MODEL KIND COUNT SECONDS THREADS BATCH KV_TYPE
 *
 * KIND, and what COUNT is: decode: tokens, one after another, from an empty context; prefill:
 * tokens of a prompt; embed: texts of 128 tokens each, in a batch; images: images to encode, a
 * vector per patch; answer: tokens of a prompt after an image, up to the first token of the answer.
 *
 * Prints a line about the model, then for each pass its seconds, and the GB/s read and 1e9 int8
 * multiply-adds per second measured right after it.
 */
#define _GNU_SOURCE /* posix_memalign */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitnet_runtime.h"
#include "kernels/limits.h"
#include "system/clock.h"

enum { TEXT = 128, LOOK = 32 << 20, LOOKS = 40, BURST = 4000 };

static const size_t BUFFER = (size_t)LOOKS * LOOK; /* too large for a cache */

typedef struct bench {
    bn_model *model;
    bn_model_info info;
    bn_image_info images; /* all 0 if the model does not take images */
    bn_session **sessions;
    int32_t n, n_sessions, n_ctx; /* tokens or texts of a pass; tokens of a session */
    int32_t *tokens;              /* [n_ctx] */
    const int32_t **texts;
    int32_t *lengths;
    float *vectors;
    float *pixels, *states; /* of n images, or of one */
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

static void see(bench *b, int32_t n) {
    ok(bn_image_encode(b->model, b->pixels, n, b->states, NULL), "");
}

static void images(bench *b) {
    see(b, b->n);
}

/* The vectors of an image, then the prompt, which is part of the prefix. */
static void answer(bench *b) {
    const int32_t n = (int32_t)b->images.n_tokens;
    int32_t token;
    see(b, 1);
    ok(bn_session_rewind(*b->sessions, 0), "");
    ok(bn_session_append_prefix(*b->sessions, b->tokens, b->states, n + b->n, BN_LOGITS_LAST, NULL),
       "");
    ok(bn_session_sample(*b->sessions, NULL, &token), "");
}

static const struct {
    const char *name;
    void (*pass)(bench *b);
} kinds[] = {{"decode", decode},
             {"prefill", prefill},
             {"embed", embed},
             {"images", images},
             {"answer", answer}};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* Allocates and fills n images, and room for their vectors. */
static void draw_images(bench *b, size_t n) {
    const size_t side = b->images.image_size, pixels = n * b->images.channels * side * side;
    b->pixels = some(pixels, sizeof *b->pixels);
    b->states = some(n * b->images.n_tokens * b->images.width, sizeof *b->states);
    for (size_t i = 0; i < pixels; i++)
        b->pixels[i] = (float)(i * 7919 % 257) / 256;
}

static int32_t type_of(const char *name) {
    int32_t type = 0;
    while (bn_kv_name(type) && strcmp(bn_kv_name(type), name) != 0)
        type++;
    return type;
}

static void open_all(bench *b, const char *path, size_t kind, int32_t threads, int32_t batch,
                     int32_t type) {
    const int together = kinds[kind].pass == embed, sees = kinds[kind].pass == answer;
    char detail[BN_DETAIL_SIZE] = "";
    uint32_t random = 1;
    ok(bn_model_open(path, &(bn_load_options){.threads = threads, .image_kv_type = type}, &b->model,
                     detail),
       detail);
    ok(bn_model_get_info(b->model, &b->info), "");
    if (bn_model_get_image_info(b->model, &b->images) == BN_OK)
        draw_images(b, sees ? 1 : (size_t)b->n);
    if (kinds[kind].pass == images)
        return;
    b->n_sessions = together ? b->n : 1;
    b->n_ctx = together ? TEXT : b->n > 256 ? b->n : 256;
    b->n_ctx = sees ? (int32_t)b->images.n_tokens + b->n : b->n_ctx;
    b->tokens = some((size_t)b->n_ctx, sizeof *b->tokens);
    for (int32_t i = 0; i < b->n_ctx; i++)
        b->tokens[i] = (int32_t)((random = random * 1664525u + 1013904223u) >> 8) %
                       (int32_t)b->info.vocab_size;
    for (uint32_t i = 0; i < b->images.n_tokens && sees; i++)
        b->tokens[i] = BN_NO_TOKEN;
    b->sessions = some((size_t)b->n_sessions, sizeof *b->sessions);
    b->texts = some((size_t)b->n_sessions, sizeof *b->texts);
    b->lengths = some((size_t)b->n_sessions, sizeof *b->lengths);
    b->vectors = some((size_t)b->n_sessions * b->info.width, sizeof *b->vectors);
    for (int32_t i = 0; i < b->n_sessions; i++) {
        ok(bn_session_new(b->model,
                          &(bn_session_options){.n_ctx = b->n_ctx, .batch = batch, .kv_type = type},
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
    pass(b); /* loads the file into memory and maps its pages */
    for (const double end = bn_seconds() + seconds; bn_seconds() < end; at = (at + LOOK) % BUFFER) {
        const double begin = bn_seconds();
        pass(b);
        const double took = bn_seconds() - begin;
        const double read = bn_read_rate(pool, buffer + at, LOOK);
        bn_int8_rate(&kernels, pool, BURST / 10); /* wakes its threads */
        printf("%.9f %.4f %.3f\n", took, 1e-9 * read, 1e-9 * bn_int8_rate(&kernels, pool, BURST));
    }
}

int main(int argc, char **argv) {
    bench b = {0};
    size_t kind = 0;
    bn_pool *pool;
    void *buffer = NULL;
    while (argc == 8 && kind < KINDS && strcmp(argv[2], kinds[kind].name) != 0)
        kind++;
    if (argc != 8 || kind == KINDS) {
        fprintf(stderr, "usage: passes MODEL decode|prefill|embed|images|answer COUNT SECONDS "
                        "THREADS BATCH KV_TYPE\n");
        return 2;
    }
    b.n = atoi(argv[3]);
    const int32_t type = type_of(argv[7]);
    open_all(&b, argv[1], kind, atoi(argv[5]), atoi(argv[6]), type);
    ok(bn_pool_new(b.info.threads, &pool), "");
    if (posix_memalign(&buffer, 1 << 21, BUFFER) != 0)
        ok(BN_ERR_MEMORY, "");
    memset(buffer, 1, BUFFER);
    printf("%s %" PRId32 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu32 " %" PRIu64
           "\n",
           b.info.isa, b.info.threads, b.info.ternary_weights, b.info.bytes_per_token,
           b.info.macs_per_token, b.info.kv_bytes_per_token[type], b.images.n_tokens,
           b.images.macs_per_image);
    run(&b, kinds[kind].pass, atof(argv[4]), pool, buffer);
    bn_pool_free(pool);
    for (int32_t i = 0; i < b.n_sessions; i++)
        bn_session_free(b.sessions[i]);
    bn_model_close(b.model);
    free(buffer), free(b.tokens), free(b.sessions), free(b.texts), free(b.lengths);
    free(b.vectors), free(b.pixels), free(b.states);
    return 0;
}
