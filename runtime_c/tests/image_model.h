/* SPDX-License-Identifier: MIT
 *
 * image_model.h: a small vision model with any options, all matrices float, and how the tests open
 * it. Include it after _POSIX_C_SOURCE is defined (posix_memalign).
 */
#ifndef BITNET_IMAGE_MODEL_H
#define BITNET_IMAGE_MODEL_H

#include "model.h"
#include "tiny_file.h"

enum { DIM = 18, HEADS = 4, KV_HEADS = 2, HEAD = 5, FFN = 22, LAYERS = 2, MAX_OUT = 30 };
#define RESIDUAL 0.125f /* the pool has neither of these two */
#define SOFTCAP 2.0f
enum { MAX_TOKENS = 577, MAX_PIXELS = 3 * 30 * 30 };
enum { PRE_NORM = 1, POST_NORM = 2, SUB_NORM = 4, LINEAR_NORM = 8, NORM_BIAS = 16 };
enum { RESIDUAL_NORM = 64, EMBEDDING_NORM = 128 };
enum { GELU = 2, SILU = 1, GELU_ERF = 4, GATED = 0, PLAIN = 1 };

/* Options of the next model; all its matrices are floats, so that a reference is exact. */
typedef struct kind {
    uint32_t size, patch, channels, class_token, norm, norm_flags, ffn, act, bias, pooling, out,
        head;
} kind;
static kind k;

static inline uint32_t tokens_of(const kind *of) {
    const uint32_t side = of->size / of->patch;
    return side * side + of->class_token;
}

static inline void put(tiny_writer *w, unsigned layer, unsigned role, uint32_t bias, size_t rows,
                       size_t cols) {
    tiny_tensor(w, layer, role, TINY_NONE, 0, 1, 0, rows, cols);
    if (bias)
        tiny_tensor(w, layer, role, TINY_NONE, 1, 1, 0, 1, rows == 1 ? cols : rows);
}

static inline void put_wide_norm(tiny_writer *w, unsigned layer, unsigned role, uint32_t flag,
                                 size_t width) {
    if (k.norm_flags & flag)
        put(w, layer, role, k.norm_flags & NORM_BIAS, 1, width);
}

static inline void put_norm(tiny_writer *w, unsigned layer, unsigned role, uint32_t flag) {
    put_wide_norm(w, layer, role, flag, DIM);
}

/* A norm for the input of each linear. */
static inline void put_linear_norms(tiny_writer *w, unsigned layer) {
    for (unsigned role = 2; role <= 4; role++)
        put_norm(w, layer, 32 + role, LINEAR_NORM);
    put_wide_norm(w, layer, 32 + 8, LINEAR_NORM, HEADS * HEAD);
    if (k.ffn == GATED)
        put_norm(w, layer, 32 + 12, LINEAR_NORM);
    put_norm(w, layer, 32 + 13, LINEAR_NORM);
    put_wide_norm(w, layer, 32 + 15, LINEAR_NORM, FFN);
}

static inline void recipe(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1), qkv = k.bias & 1, o = k.bias & 2, ffn = k.bias & 4;
    uint32_t words[48] = {2, 1, 0, DIM, LAYERS, HEADS, KV_HEADS, HEAD, FFN, tokens_of(&k)};
    words[11] = k.norm, words[12] = k.norm_flags | TINY_FINAL_NORM;
    words[13] = tiny_float_bits(1e-6f);
    words[14] = k.ffn, words[15] = k.act, words[18] = 1, words[20] = k.bias;
    words[19] = words[22] = one;
    words[23] = tiny_float_bits(RESIDUAL), words[24] = tiny_float_bits(0.4f);
    words[25] = tiny_float_bits(SOFTCAP);
    words[27] = k.pooling;
    words[33] = k.size, words[34] = k.patch, words[35] = k.channels;
    for (uint32_t i = 0; i < k.channels; i++)
        words[36 + i] = tiny_float_bits(0.5f), words[39 + i] = tiny_float_bits(0.25f);
    words[42] = k.class_token, words[43] = k.out;
    words[2] = words[28] = k.head;
    tiny_stack(w, words, "vision");
    for (unsigned l = 0; l < LAYERS; l++) {
        put_norm(w, l, 1, PRE_NORM);
        put(w, l, 2, qkv, HEADS * HEAD, DIM);
        put(w, l, 3, qkv, KV_HEADS * HEAD, DIM);
        put(w, l, 4, qkv, KV_HEADS * HEAD, DIM);
        put_wide_norm(w, l, 7, SUB_NORM, HEADS * HEAD);
        put(w, l, 8, o, DIM, HEADS * HEAD);
        put_norm(w, l, 9, POST_NORM | RESIDUAL_NORM);
        put_norm(w, l, 10, PRE_NORM);
        if (k.ffn == GATED)
            put(w, l, 12, ffn, FFN, DIM);
        put(w, l, 13, ffn, FFN, DIM);
        put_wide_norm(w, l, 14, SUB_NORM, FFN);
        put(w, l, 15, ffn, DIM, FFN);
        put_norm(w, l, 16, POST_NORM | RESIDUAL_NORM);
        put_linear_norms(w, l);
    }
    put(w, TINY_NONE, 65, 0, tokens_of(&k), DIM);
    put_norm(w, TINY_NONE, 66, UINT32_MAX);
    if (k.head)
        put(w, TINY_NONE, 67, 0, 1, DIM);
    put_norm(w, TINY_NONE, 68, EMBEDDING_NORM);
    put(w, TINY_NONE, 74, k.bias & 32, DIM, k.channels * k.patch * k.patch);
    if (k.class_token)
        put(w, TINY_NONE, 75, 0, 1, DIM);
    if (k.out)
        put(w, TINY_NONE, 76, k.bias & 16, k.out, DIM);
    if (k.pooling != BN_POOL_ATTENTION)
        return;
    put(w, TINY_NONE, 80, 0, 1, DIM);
    for (unsigned role = 81; role <= 83; role++)
        put(w, TINY_NONE, role, qkv, HEADS * HEAD, DIM);
    put(w, TINY_NONE, 84, o, DIM, HEADS * HEAD);
    put(w, TINY_NONE, 85, k.norm_flags & NORM_BIAS, 1, DIM);
    put(w, TINY_NONE, 86, ffn, FFN, DIM);
    put(w, TINY_NONE, 87, ffn, DIM, FFN);
}

static inline void ok(bn_status status) {
    CHECK_MSG(status == BN_OK, "%s", bn_status_text(status));
}

static uint8_t *bytes;
static size_t size;

static inline bn_model *open_bytes(const char *isa, int32_t threads) {
    const bn_load_options options = {.threads = threads, .isa = isa};
    char why[BN_DETAIL_SIZE] = "";
    bn_model *model;
    const bn_status status = bn_model_open_bytes(bytes, size, &options, &model, why);
    CHECK_MSG(status == BN_OK, "%s", why);
    return model;
}

static inline void make(void (*of)(tiny_writer *)) {
    free(bytes);
    bytes = tiny_file(of, SIZE_MAX, SIZE_MAX, &size);
}

static inline float *random_pixels(size_t n) {
    float *pixels = malloc(n * sizeof *pixels);
    uint64_t random = 3;
    CHECK(pixels != NULL);
    for (size_t i = 0; i < n; i++)
        pixels[i] = (check_float(&random) + 1) / 2;
    return pixels;
}

#endif
