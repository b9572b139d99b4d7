/* SPDX-License-Identifier: MIT
 *
 * test_seeing.c: images give the same bits on every tier, with any threads, and whatever else is
 * running; a text tower with a projector; memory.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include <pthread.h>
#include <stdatomic.h>

#include "cache.h"
#include "image_model.h"
#include "session/images.h"
#include "session/session.h"
#include "workspace.h"

/* Larger than what is computed at a time. */
static void large(tiny_writer *w) {
    k = (kind){23, 1, 1, 1, 1, PRE_NORM, PLAIN, GELU, 0, BN_POOL_ATTENTION, 3, 0};
    recipe(w);
}

enum { IMAGES = 104, FLOATS = 5 * 24 + 24 }; /* more than are computed at a time */

static void see(const bn_model *model, const float *pixels, int32_t n, float *out) {
    bn_image_info info;
    ok(bn_model_get_image_info(model, &info));
    ok(bn_image_encode(model, pixels, n, out, NULL));
    ok(bn_image_embed(model, pixels, n, out + (size_t)n * info.n_tokens * info.width, NULL));
}

/* Tiers, threads, and images alone. */
static void test_bits(void (*of)(tiny_writer *), int32_t n, size_t of_image, size_t floats) {
    float *pixels = random_pixels((size_t)n * of_image), *out[2];
    for (int i = 0; i < 2; i++)
        CHECK(out[i] = malloc((size_t)n * floats * sizeof **out));
    make(of);
    for (int32_t i = 0, first = 1; bn_isa_name(i) != NULL; i++)
        for (int32_t threads = 1; threads <= 3; threads += 2, first = 0) {
            bn_model *model = open_bytes(bn_isa_name(i), threads);
            see(model, pixels, n, out[!first]);
            CHECK_MSG(first || memcmp(out[0], out[1], (size_t)n * floats * sizeof **out) == 0,
                      "%s, %d threads", bn_isa_name(i), (int)threads);
            bn_model_close(model);
        }
    bn_model *model = open_bytes(NULL, 2);
    bn_image_info info;
    ok(bn_model_get_image_info(model, &info));
    const size_t states = (size_t)info.n_tokens * info.width;
    for (int32_t i = 0; i < n; i += n / 3 + 1) {
        see(model, pixels + (size_t)i * of_image, 1, out[1]);
        CHECK(memcmp(out[1], out[0] + (size_t)i * states, states * sizeof **out) == 0);
        CHECK(memcmp(out[1] + states, out[0] + (size_t)n * states + (size_t)i * info.width,
                     info.width * sizeof **out) == 0);
    }
    bn_model_close(model);
    free(pixels), free(out[0]), free(out[1]);
}

static void test_facts(void) {
    bn_image_info info;
    bn_model_info text;
    make(tiny_seeing);
    bn_model *model = open_bytes(NULL, 1);
    ok(bn_model_get_info(model, &text));
    ok(bn_model_get_image_info(model, &info));
    CHECK(text.vocab_size == 19 && text.dim == 24 && text.has_head && text.width == 24);
    CHECK(info.image_size == 8 && info.patch_size == 3 && info.channels == 2);
    CHECK(info.n_tokens == 5 && info.width == 24 && info.pooled && info.image_token == 18);
    CHECK(info.similarity_scale == 10 && info.similarity_bias == -10);
    CHECK(info.pixel_mean[1] == 0.4f && info.pixel_std[0] == 0.25f && info.pixel_std[2] == 0);
    CHECK_EQ(info.macs_per_image, 5 * 2 * (20 * 18 * 3 + 20 * 25 * 2));
    bn_model_close(model);
}

/* --- bn_stop --- */

static bn_stop asked;
static atomic_int rows_normed;
static bn_normalize *layer_norm;

/* Request a stop at the very first row. */
static int stopping_norm(const bn_norming *a) {
    if (atomic_fetch_add(&rows_normed, (int)a->rows) == 0)
        bn_stop_now(&asked);
    return layer_norm(a);
}

/* A stop ends the call after the current 128 of 530 rows, and every later call before any. */
static void test_stop(void) {
    enum { STATES = 530 * 3 };
    float *pixels = random_pixels(23 * 23), *out = calloc(2 * STATES, sizeof *out);
    bn_stop other = {0};
    CHECK(out != NULL);
    make(large);
    bn_model *model = open_bytes(NULL, 2);
    ok(bn_image_encode(model, pixels, 1, out, &other));
    layer_norm = model->kernels.vectors.layer_norm;
    model->kernels.vectors.layer_norm = stopping_norm;
    CHECK_EQ(bn_image_encode(model, pixels, 1, out + STATES, &asked), BN_ERR_CANCELLED);
    CHECK_MSG(rows_normed <= 128, "%d", rows_normed);
    const int rows = rows_normed;
    CHECK_EQ(bn_image_encode(model, pixels, 1, out + STATES, &asked), BN_ERR_CANCELLED);
    CHECK_EQ(bn_image_embed(model, pixels, 1, out + STATES, &asked), BN_ERR_CANCELLED);
    CHECK_EQ(rows_normed, rows);
    ok(bn_image_encode(model, pixels, 1, out + STATES, &other));
    CHECK(memcmp(out, out + STATES, STATES * sizeof *out) == 0);
    bn_stop_now(NULL);
    bn_model_close(model);
    free(pixels), free(out);
}

/* --- with texts --- */

enum { TEXT_DIM = 24, TEXT_OUT = 11 };

/* A text tower: mean pooling, then a projector with a bias. */
static void text_tower(tiny_writer *w) {
    tiny_decoder(w);
    const uint32_t words[] = {[1] = 1, [20] = 16, [27] = BN_POOL_MEAN, [28] = 0, [43] = TEXT_OUT};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (i == 28 || words[i])
            tiny_put(w->stacks + 4 * i, words[i], 4);
    tiny_with_bias(w, TINY_NONE, 76, TINY_NONE, 1, 0, TEXT_OUT, TEXT_DIM);
    tiny_vision(w, TEXT_OUT);
}

/* The projector is applied after pooling, alone or with others, so its bias is added to the
 * mean. */
static void test_text_tower(void) {
    const int32_t tokens[] = {3, 1, 4, 1, 5, 9, 2}, *texts[] = {tokens, tokens + 2};
    const int32_t lengths[] = {7, 4};
    float out[2][TEXT_OUT], alone[TEXT_OUT];
    bn_model_info info;
    bn_session *s[2];
    make(text_tower);
    bn_model *model = open_bytes(NULL, 2);
    ok(bn_model_get_info(model, &info));
    CHECK(info.dim == TEXT_DIM && info.width == TEXT_OUT && info.pooling == BN_POOL_MEAN);
    for (int i = 0; i < 2; i++)
        ok(bn_session_new(model, NULL, &s[i]));
    ok(bn_embed_batch(s, texts, lengths, 2, BN_POOL_MODEL, out[0]));
    for (int i = 0; i < 2; i++) {
        const bn_tensor *t = &model->stack.projector;
        const float *w = (const float *)(const void *)t->data;
        double y[TEXT_OUT], squares = 0;
        for (size_t r = 0; r < TEXT_OUT; r++) {
            y[r] = (double)t->bias[r];
            for (size_t d = 0; d < TEXT_DIM; d++)
                y[r] += (double)w[r * TEXT_DIM + d] * (double)s[i]->pool[d] / lengths[i];
            squares += y[r] * y[r];
        }
        for (size_t r = 0; r < TEXT_OUT; r++) /* fp32 of sums of 24 terms below 1 */
            CHECK(fabs((double)out[i][r] - y[r] / sqrt(squares)) < 1e-5);
        ok(bn_session_rewind(s[i], 0));
        ok(bn_session_embed(s[i], texts[i], lengths[i], BN_POOL_MODEL, alone));
        CHECK(memcmp(alone, out[i], sizeof alone) == 0);
        bn_session_free(s[i]);
    }
    bn_model_close(model);
}

/* More texts than the projector takes at a time. */
static void test_many_texts(void) {
    enum { TEXTS = 40 };
    const int32_t tokens[TEXTS] = {3, 1, 4, 1, 5, 9, 2};
    const int32_t *texts[TEXTS];
    int32_t lengths[TEXTS];
    float out[TEXTS][TEXT_OUT], alone[TEXT_OUT];
    bn_session *s[TEXTS];
    make(text_tower);
    bn_model *model = open_bytes(NULL, 2);
    for (int i = 0; i < TEXTS; i++) {
        ok(bn_session_new(model, &(bn_session_options){.batch = 4}, &s[i]));
        texts[i] = tokens, lengths[i] = 1 + i % 20;
    }
    ok(bn_embed_batch(s, texts, lengths, TEXTS, BN_POOL_MODEL, out[0]));
    for (int i = 0; i < TEXTS; i++) {
        ok(bn_session_rewind(s[i], 0));
        ok(bn_session_embed(s[i], texts[i], lengths[i], BN_POOL_MODEL, alone));
        CHECK(memcmp(alone, out[i], sizeof alone) == 0);
        bn_session_free(s[i]);
    }
    bn_model_close(model);
}

/* Images and a session at the same time. */
typedef struct caller {
    const bn_model *model;
    const float *pixels;
    float *out;
} caller;

static void *call(void *context) {
    const caller *c = context;
    for (int i = 0; i < 2; i++)
        see(c->model, c->pixels, IMAGES, c->out);
    return NULL;
}

static void test_threads(void) {
    const size_t floats = IMAGES * FLOATS;
    float *pixels = random_pixels(IMAGES * 128), *expected = malloc(floats * sizeof *expected);
    float *out = malloc(2 * floats * sizeof *out);
    pthread_t threads[2];
    CHECK(expected && out);
    make(tiny_seeing);
    bn_model *model = open_bytes(NULL, 2);
    see(model, pixels, IMAGES, expected);
    caller callers[] = {{model, pixels, out}, {model, pixels, out + floats}};
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, call, &callers[i]) == 0);
    bn_session *s;
    ok(bn_session_new(model, NULL, &s));
    for (int i = 0; i < 5; i++) { /* its images become the prefix of a text */
        const int32_t prefix[] = {-1, -1, -1, -1, -1, 3, 1}, token = 4;
        ok(bn_session_rewind(s, 0));
        ok(bn_session_append_prefix(s, prefix, expected, 7, BN_LOGITS_LAST, NULL));
        ok(bn_session_append(s, &token, 1, BN_LOGITS_LAST, NULL));
    }
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(memcmp(callers[i].out, expected, floats * sizeof *out) == 0);
    }
    bn_session_free(s);
    bn_model_close(model);
    free(pixels), free(expected), free(out);
}

/* The larger encoder of PaliGemma: memory of its calls besides the file. */
static void test_memory(void) {
    make(tiny_decoder);
    bn_model *model = open_bytes(NULL, 8);
    bn_cache cache = {.type = BN_KV_F32};
    bn_stack stack = {.config = {.input = BN_INPUT_IMAGES,
                                 .mask = BN_MASK_BIDIRECTIONAL,
                                 .dim = 1152,
                                 .n_layers = 27,
                                 .n_heads = 16,
                                 .n_kv_heads = 16,
                                 .head_dim = 72,
                                 .ffn_dim = 4304,
                                 .max_context = 256},
                      .patch.cols = 588,
                      .cached = {1}};
    const size_t bytes_of_call =
        bn_workspace_size(model, &stack, 128, 512) + 2 * bn_cache_plan(&cache, &stack, 256, 256);
    bn_model *wider = open_bytes(NULL, 64);
    const size_t of_threads =
        bn_workspace_size(wider, &stack, 128, 512) - bn_workspace_size(model, &stack, 128, 512);
    CHECK_MSG(of_threads < (size_t)(64 - 8) * (2 << 20), "%zu", of_threads);
    bn_model_close(wider);
    CHECK_MSG(bytes_of_call < 64 << 20, "%zu", bytes_of_call);
    bn_model_close(model);
    CHECK_EQ(bn_images_together(&stack, 100), 2);
    CHECK_EQ(bn_images_together(&stack, 1), 1);
    stack.config.max_context = 1024;
    CHECK_EQ(bn_images_together(&stack, 100), 1);
    stack.config.max_context = 4; /* images of 1024 pixels in patches of 512 */
    CHECK_EQ(bn_images_together(&stack, 1000), 128);
    stack.config.max_context = 1;
    CHECK_EQ(bn_images_together(&stack, 1000), 128); /* one row per image is pooled */
    stack.config.max_context = 4;
    stack.patch.cols = 3 * 512 * 512;
    CHECK_EQ(bn_images_together(&stack, 1000), 5); /* 64 MiB at 12 MiB each */
    stack.patch.cols *= 16;
    CHECK_EQ(bn_images_together(&stack, 1000), 1);
}

int main(void) {
    test_bits(tiny_seeing, IMAGES, 128, FLOATS);
    test_bits(large, 1, 23 * 23, 530 * 3 + 3);
    test_facts();
    test_stop();
    test_text_tower();
    test_many_texts();
    test_threads();
    test_memory();
    free(bytes);
    return 0;
}
