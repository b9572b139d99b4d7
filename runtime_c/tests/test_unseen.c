/* SPDX-License-Identifier: MIT
 *
 * test_unseen.c: vision files and image calls that are refused.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "image_model.h"

static void only_images(tiny_writer *w) {
    tiny_vision(w, 0);
}

/* A vision-only model refuses sessions. */
static void test_only_images(void) {
    bn_model_info info;
    bn_image_info images;
    bn_session *s;
    bn_session_memory memory;
    make(only_images);
    bn_model *model = open_bytes(NULL, 1);
    ok(bn_model_get_info(model, &info));
    CHECK(info.vocab_size == 0 && info.dim == 20 && info.n_layers == 2 && info.max_context == 5);
    CHECK(!info.has_text && !info.has_head && !info.has_embedding && !info.pooling &&
          info.ternary_weights > 0);
    CHECK(info.kv_bytes_per_token[0] == 0 && info.kv_window_bytes_per_token[0] == 0);
    ok(bn_model_get_image_info(model, &images));
    CHECK(images.width == 20 && images.image_token == -1);
    CHECK_EQ(bn_session_new(model, NULL, &s), BN_ERR_INPUT);
    CHECK_EQ(bn_session_plan(model, NULL, &memory), BN_ERR_INPUT);
    bn_model_close(model);
}

static void test_only_text(void) {
    float pixels[1] = {0}, out[1] = {7};
    bn_image_info info;
    make(tiny_decoder);
    bn_model *model = open_bytes(NULL, 1);
    CHECK_EQ(bn_model_get_image_info(model, &info), BN_ERR_INPUT);
    CHECK_EQ(bn_image_encode(model, pixels, 1, out, NULL), BN_ERR_INPUT);
    CHECK_EQ(bn_image_embed(model, pixels, 1, out, NULL), BN_ERR_INPUT);
    CHECK(out[0] == 7);
    bn_model_close(model);
}

static void test_arguments(void) {
    enum { N = 2 * 3 * 64 };
    float *pixels = random_pixels(N), out[2 * 4 * DIM] = {7};
    bn_image_info info;
    k = (kind){8, 4, 3, 0, 1, PRE_NORM, PLAIN, GELU, 0, 0, 0, 0};
    make(recipe);
    bn_model *model = open_bytes(NULL, 1);
    ok(bn_model_get_image_info(model, &info));
    CHECK(!info.pooled && info.similarity_scale == 0);
    CHECK_EQ(bn_image_embed(model, pixels, 1, out, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_image_encode(NULL, pixels, 1, out, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_image_encode(model, NULL, 1, out, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_image_encode(model, pixels, 1, NULL, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_image_encode(model, pixels, 0, out, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_image_encode(model, pixels, INT32_MIN, out, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_model_get_image_info(NULL, &info), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_model_get_image_info(model, NULL), BN_ERR_ARGUMENT);
    const float wrong[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 3; i++) {
        pixels[N - 1] = wrong[i];
        CHECK_EQ(bn_image_encode(model, pixels, 2, out, NULL), BN_ERR_NUMERIC);
        CHECK(out[0] == 7);
    }
    pixels[N - 1] = 3e38f; /* finite, but the patch embedding is not */
    pixels[N - 2] = 3e38f;
    CHECK_EQ(bn_image_encode(model, pixels, 2, out, NULL), BN_ERR_NUMERIC);
    bn_model_close(model);
    free(pixels);
}

static uint32_t word, value; /* index and new value of a word of the last stack */

static void two_of_images(tiny_writer *w) {
    tiny_vision(w, 0);
    tiny_vision(w, 0);
}

static void two_of_text(tiny_writer *w) {
    tiny_decoder(w);
    tiny_decoder(w);
}

static void changed(tiny_writer *w) {
    tiny_vision(w, 0);
    tiny_put(w->stacks + 4 * word, value, 4);
}

static void with_head(tiny_writer *w) {
    k = (kind){8, 4, 3, 0, 1, PRE_NORM, PLAIN, GELU, 0, 0, 0, 1};
    recipe(w);
}

/* A text stack of vectors with attention pooling. */
static void text_attention(tiny_writer *w) {
    const unsigned rows[] = {1, 3, 3, 3, 8, 1, 5, 8}, cols[] = {8, 8, 8, 8, 3, 8, 8, 5};
    tiny_bare(w);
    tiny_put(w->stacks + 4 * 27, 4, 4);
    for (unsigned i = 0; i < 8; i++)
        tiny_tensor(w, TINY_NONE, 80 + i, TINY_NONE, 0, 1, 0, rows[i], cols[i]);
}

static void narrow(tiny_writer *w) {
    tiny_decoder(w);
    tiny_put(w->stacks + 4 * 46, 18, 4);
    tiny_vision(w, 23);
}

/* Change `word` of the text stack before it; without an image token. */
static void two_widths(tiny_writer *w) {
    tiny_decoder(w);
    tiny_put(w->stacks + 4 * 27, BN_POOL_LAST, 4);
    tiny_put(w->stacks + 4 * 28, 0, 4);
    tiny_vision(w, 25);
}

static void images_first(tiny_writer *w) {
    tiny_vision(w, 24);
    tiny_decoder(w);
}

/* A decoder with vision, with one word of the text stack changed. */
static void decoder_changed(tiny_writer *w) {
    tiny_decoder(w);
    tiny_put(w->stacks + 4 * 1, BN_MASK_PREFIX, 4);
    tiny_put(w->stacks + 4 * 46, 18, 4);
    tiny_put(w->stacks + 4 * word, value, 4);
    tiny_vision(w, 24);
}

static void one_name(tiny_writer *w) {
    tiny_seeing(w);
    memcpy(w->stacks + 192, w->stacks + 256 + 192, 64);
}

static void test_files(void) {
    const struct {
        void (*of)(tiny_writer *);
        uint32_t word, value;
        bn_status status;
        const char *says;
    } files[] = {
        {two_of_images, 0, 0, BN_ERR_UNSUPPORTED, "more than one stack that takes images"},
        {two_of_text, 0, 0, BN_ERR_UNSUPPORTED, "more than one stack that takes text"},
        {tiny_images, 0, 0, BN_ERR_UNSUPPORTED, "adapters"},
        {changed, 1, BN_MASK_CAUSAL, BN_ERR_CONFIG, "mask is 0, expected 1 to 1"},
        {changed, 1, BN_MASK_PREFIX, BN_ERR_CONFIG, "mask is 2, expected 1 to 1"},
        {with_head, 0, 0, BN_ERR_CONFIG, "has_head is 1, expected 0 to 0"},
        {text_attention, 0, 0, BN_ERR_CONFIG, "pooling is 4, expected 0 to 3"},
        {images_first, 0, 0, BN_ERR_CONFIG, "the image stack is the first"},
        {one_name, 0, 0, BN_ERR_CONFIG, "have the same name, expected two names"},
        {decoder_changed, 0, BN_INPUT_EMBEDDINGS, BN_ERR_CONFIG, "takes no tokens"},
        {decoder_changed, 1, BN_MASK_BIDIRECTIONAL, BN_ERR_CONFIG, "a mask that is causal"},
        {decoder_changed, 46, 0, BN_ERR_CONFIG, "images and a head, expected an image_token"},
        {decoder_changed, 28, 0, BN_ERR_CONFIG, "an image_token, expected also a head"},
        {narrow, 0, 0, BN_ERR_CONFIG,
         "vectors have 23 numbers, expected 24, as the text stack has"},
        {two_widths, 0, 0, BN_ERR_CONFIG,
         "vectors have 25 numbers, expected 24, as text vectors have"}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char why[BN_DETAIL_SIZE] = "";
        bn_model *model = NULL;
        word = files[i].word, value = files[i].value;
        make(files[i].of);
        CHECK_EQ(bn_model_open_bytes(bytes, size, NULL, &model, why), files[i].status);
        CHECK_MSG(model == NULL && strstr(why, files[i].says), "%s", why);
    }
}

int main(void) {
    test_only_images();
    test_only_text();
    test_arguments();
    test_files();
    free(bytes);
    return 0;
}
