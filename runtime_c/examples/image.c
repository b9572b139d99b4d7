/* SPDX-License-Identifier: MIT
 *
 * image.c: show a picture to a model, as a PPM file of the model's image size. Pillow writes one:
 *
 *     Image.open("cat.png").convert("RGB").resize((224, 224), Image.BICUBIC).save("cat.ppm")
 *
 *     example_image model.bitnet cat.ppm COUNT ID...
 *
 * prints up to COUNT token ids that follow the picture and the ids given. With a model that
 * compares images and texts,
 *
 *     example_image model.bitnet cat.ppm 0 ID...
 *
 * prints how similar the picture is to the text of these ids.
 */
#include "example.h"
#include <stdbool.h>

/* Zeroed memory for n elements; ends the program if there is none. */
static void *room(size_t n, size_t size) {
    void *memory = calloc(n, size);
    if (!memory)
        check(BN_ERR_MEMORY, "memory", NULL);
    return memory;
}

/* Read a binary PPM file without comments as float[3][size][size], from 0 to 1. */
static float *read_ppm(const char *path, uint32_t size) {
    FILE *file = fopen(path, "rb");
    uint32_t width = 0, height = 0, most = 0;
    const bool is_ppm = file && fscanf(file, "P6 %9u %9u %9u", &width, &height, &most) == 3;
    if (!is_ppm || width != size || height != size || most != 255 || fgetc(file) == EOF) {
        fprintf(stderr, "%s: expected a PPM file (P6) of %u x %u pixels and 8 bits\n", path, size,
                size);
        exit(1);
    }
    const size_t n = (size_t)size * size;
    float *pixels = room(3 * n, sizeof *pixels);
    /* the file has RGB per pixel, the model takes all red first */
    for (size_t i = 0; i < 3 * n; i++) {
        const int value = fgetc(file);
        if (value == EOF) {
            fprintf(stderr, "%s: ends after %zu of %zu bytes of pixels\n", path, i, 3 * n);
            exit(1);
        }
        pixels[i % 3 * n + i / 3] = (float)value / 255.0f;
    }
    fclose(file);
    return pixels;
}

/* Append the image, then the text. All tokens of a prefix see each other, so it comes in one
 * call. */
static void append(bn_session *session, bool prefix, const float *vectors, int32_t n_image,
                   const int32_t *text, int32_t n_text) {
    const int32_t n = n_image + n_text;
    if (!prefix) {
        check(bn_session_append_embeddings(session, vectors, n_image, BN_LOGITS_NONE, NULL),
              "picture", NULL);
        check(bn_session_append(session, text, n_text, BN_LOGITS_LAST, NULL), "prompt", NULL);
        return;
    }
    int32_t *prompt = room((size_t)n, sizeof *prompt);
    for (int32_t i = 0; i < n; i++)
        prompt[i] = i < n_image ? BN_NO_TOKEN : text[i - n_image];
    check(bn_session_append_prefix(session, prompt, vectors, n, BN_LOGITS_LAST, NULL), "prompt",
          NULL);
    free(prompt);
}

/* Continue image and text. */
static void answer(bn_model *model, const bn_image_info *seen, const float *pixels,
                   const int32_t *text, int32_t n_text, int32_t count) {
    float *vectors = room((size_t)seen->n_tokens * seen->width, sizeof *vectors);
    bn_model_info info;
    bn_session *session;
    check(bn_model_get_info(model, &info), "model", NULL);
    check(bn_image_encode(model, pixels, 1, vectors, NULL), "picture", NULL);
    check(bn_session_new(model, NULL, &session), "session", NULL);
    append(session, info.mask == BN_MASK_PREFIX, vectors, (int32_t)seen->n_tokens, text, n_text);
    bn_status status = BN_OK;
    for (int32_t i = 0; i < count && !status; i++) {
        int32_t token, n_made;
        status = bn_session_step(session, NULL, NULL, 0, &token, 1, &n_made); /* the most likely */
        if (!status)
            printf("%d\n", (int)token);
    }
    if (status != BN_ERR_CONTEXT) /* a full context ends the text */
        check(status, "generate", NULL);
    bn_session_free(session);
    free(vectors);
}

/* Print the similarity of image and text. */
static void compare(bn_model *model, const bn_image_info *seen, const float *pixels,
                    const int32_t *text, int32_t n_text) {
    float *image = room(2 * (size_t)seen->width, sizeof *image), *words = image + seen->width;
    float cosine = 0;
    bn_session *session;
    check(bn_image_embed(model, pixels, 1, image, NULL), "picture", NULL);
    check(bn_session_new(model, NULL, &session), "session", NULL);
    check(bn_session_embed(session, text, n_text, BN_POOL_MODEL, words), "text", NULL);
    for (uint32_t i = 0; i < seen->width; i++)
        cosine += image[i] * words[i];
    const bool scaled = seen->similarity_scale > 0;
    printf("%.6f\n", scaled ? seen->similarity_scale * cosine + seen->similarity_bias : cosine);
    bn_session_free(session);
    free(image);
}

int main(int argc, char **argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: %s model.bitnet picture.ppm COUNT ID...\n", argv[0]);
        return 2;
    }
    const int32_t count = number(argv[3], 0), n_text = argc - 4;
    int32_t *text = room((size_t)n_text, sizeof *text);
    for (int32_t i = 0; i < n_text; i++)
        text[i] = number(argv[4 + i], 0);

    bn_model *model = open_model(argv[1]);
    bn_image_info seen;
    check(bn_model_get_image_info(model, &seen), argv[1], NULL);
    if (seen.channels != 3) {
        fprintf(stderr, "%s: takes pictures of %u channels, this program reads 3\n", argv[1],
                seen.channels);
        return 1;
    }
    float *pixels = read_ppm(argv[2], seen.image_size);
    if (seen.image_token >= 0)
        answer(model, &seen, pixels, text, n_text, count);
    else
        compare(model, &seen, pixels, text, n_text);
    bn_model_close(model);
    free(pixels);
    free(text);
    return 0;
}
