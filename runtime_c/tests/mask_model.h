/* SPDX-License-Identifier: MIT
 *
 * mask_model.h: a small model with any mask and window, a draft, and adapters. Include it after
 * _POSIX_C_SOURCE is defined (posix_memalign).
 */
#ifndef BITNET_MASK_MODEL_H
#define BITNET_MASK_MODEL_H

#include "session/session.h"
#include "tiny_file.h"

enum { DIM = 40, HEAD = 12, HEADS = 4, KV_HEADS = 2, FFN = 50, VOCAB = 61, LAYERS = 3, TEXT = 700 };

/* Options of the next model. */
static struct { uint32_t input, mask, window, global_every, headless, draft, rank, lines; } kind;

/* A linear, with an adapter if the rank is not 0. */
static inline void linear(tiny_writer *w, unsigned l, unsigned role, uint32_t rank, size_t rows,
                          size_t cols) {
    const unsigned encoding = !kind.lines ? 4 : role == 13 ? 7 : role == 15 ? 8 : 4;
    tiny_tensor(w, l, role, TINY_NONE, 0, encoding, 1, rows, cols);
    if (rank > 0) {
        tiny_tensor(w, l, role, TINY_NONE, 2, 6, 2, rank, cols);
        tiny_tensor(w, l, role, TINY_NONE, 3, 6, 2, rank, rows);
    }
}

static inline void layer(tiny_writer *w, unsigned l, uint32_t rank) {
    const unsigned rows[] = {HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD};
    tiny_tensor(w, l, 1, TINY_NONE, 0, 1, 0, 1, DIM);
    for (unsigned i = 0; i < 3; i++)
        linear(w, l, 2 + i, rank, rows[i], DIM);
    linear(w, l, 8, rank, DIM, HEADS * HEAD);
    tiny_tensor(w, l, 10, TINY_NONE, 0, 1, 0, 1, DIM);
    linear(w, l, 12, rank, FFN, DIM);
    linear(w, l, 13, rank, FFN, DIM);
    linear(w, l, 15, rank, DIM, FFN);
}

/* A draft with the same window. `words`: the record of the stack before it. */
static inline void draft_recipe(tiny_writer *w, uint32_t words[48]) {
    words[0] = BN_INPUT_DRAFT;
    words[2] = words[28] = words[30] = words[47] = 0;
    words[4] = 1;
    words[22] = tiny_float_bits(1);
    tiny_stack(w, words, "draft");
    layer(w, 0, 0);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, HEAD / 2);
    tiny_tensor(w, TINY_NONE, 71, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, TINY_NONE, 72, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, TINY_NONE, 73, TINY_NONE, 0, 4, 2, DIM, 2 * DIM);
}

static inline void recipe(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1);
    uint32_t words[48] = {kind.input, kind.mask, VOCAB, DIM,  LAYERS,     HEADS,
                          KV_HEADS,   HEAD,      FFN,   TEXT, kind.window};
    words[12] = 1 | TINY_FINAL_NORM;
    words[13] = tiny_float_bits(1e-5f);
    words[19] = words[22] = words[23] = one;
    words[22] = tiny_float_bits(2.5f);
    words[24] = tiny_float_bits(0.3f);
    words[27] = kind.headless ? BN_POOL_MEAN : 0;
    words[28] = !kind.headless;
    words[29] = HEAD;
    words[30] = kind.global_every;
    words[47] = kind.rank ? kind.rank | 127u << 16 : 0;
    tiny_stack(w, words, "mask_model");
    for (unsigned l = 0; l < LAYERS; l++)
        layer(w, l, kind.rank);
    if (kind.input == 0)
        tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, VOCAB, DIM);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, DIM);
    if (!kind.headless)
        tiny_tensor(w, TINY_NONE, 67, TINY_NONE, 0, 6, 2, VOCAB, DIM);
    for (unsigned role = 69; role <= (kind.global_every ? 70u : 69u); role++)
        tiny_tensor(w, TINY_NONE, role, TINY_NONE, 0, 1, 0, 1, HEAD / 2);
    if (kind.draft)
        draft_recipe(w, words);
}

static uint8_t *file;
static size_t file_size;
static bn_model *model;
static int32_t text[TEXT];

static inline void ok(bn_status status) {
    CHECK_MSG(status == BN_OK, "%s", bn_status_text(status));
}

static inline void open_model(const char *isa, int32_t threads) {
    const bn_load_options options = {.threads = threads, .isa = isa};
    char why[BN_DETAIL_SIZE] = "";
    const bn_status status = bn_model_open_bytes(file, file_size, &options, &model, why);
    CHECK_MSG(status == BN_OK, "%s", why);
}

/* Draw a text and open a model; `end` closes it. */
static inline void begin(uint32_t mask, uint32_t window, uint32_t global_every) {
    kind.mask = mask, kind.window = window, kind.global_every = global_every;
    uint64_t random = 5;
    for (int i = 0; i < TEXT; i++)
        text[i] = (int32_t)check_below(&random, VOCAB);
    file = tiny_file(recipe, SIZE_MAX, SIZE_MAX, &file_size);
    open_model(NULL, 2);
}

static inline void end(void) {
    bn_model_close(model);
    free(file);
    memset(&kind, 0, sizeof kind);
}

static inline bn_session *session(int32_t n_ctx, int32_t batch, int32_t kv_type) {
    const bn_session_options o = {.n_ctx = n_ctx, .batch = batch, .kv_type = kv_type};
    bn_session *s;
    ok(bn_session_new(model, &o, &s));
    return s;
}

#endif
