/* SPDX-License-Identifier: MIT
 *
 * session_model.h: the model of the session tests, and how they check a status. Include it after
 * _POSIX_C_SOURCE is defined (posix_memalign).
 */
#ifndef BITNET_SESSION_MODEL_H
#define BITNET_SESSION_MODEL_H

#include "session/session.h"
#include "tiny_file.h"

enum { DIM = 48, HEAD = 16, HEADS = 3, KV_HEADS = 1, FFN = 80, VOCAB = 9001, LAYERS = 2 };
enum { CONTEXT = 320, PROMPT = 250, NEW = 60 };

/* down: encoding of the last matrix of a layer. */
static inline void session_model(tiny_writer *w, unsigned down) {
    const uint32_t one = tiny_float_bits(1);
    uint32_t words[48] = {0, 0, VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD, FFN, CONTEXT};
    words[12] = 1 | TINY_FINAL_NORM;
    words[13] = tiny_float_bits(1e-5f);
    words[19] = words[22] = words[23] = one;
    words[21] = words[28] = 1;
    words[24] = tiny_float_bits(0.25f);
    words[29] = HEAD;
    tiny_stack(w, words, "session_model");
    for (unsigned l = 0; l < LAYERS; l++) {
        tiny_tensor(w, l, 1, TINY_NONE, 0, 1, 0, 1, DIM);
        tiny_tensor(w, l, 2, TINY_NONE, 0, 4, 1, HEADS * HEAD, DIM);
        tiny_tensor(w, l, 3, TINY_NONE, 0, 4, 1, KV_HEADS * HEAD, DIM);
        tiny_tensor(w, l, 4, TINY_NONE, 0, 4, 1, KV_HEADS * HEAD, DIM);
        tiny_tensor(w, l, 8, TINY_NONE, 0, 4, 1, DIM, HEADS * HEAD);
        tiny_tensor(w, l, 10, TINY_NONE, 0, 1, 0, 1, DIM);
        tiny_tensor(w, l, 12, TINY_NONE, 0, 4, 1, FFN, DIM);
        tiny_tensor(w, l, 13, TINY_NONE, 0, 4, 1, FFN, DIM);
        tiny_tensor(w, l, 15, TINY_NONE, 0, down, 1, DIM, FFN);
    }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 9, 2, VOCAB, DIM);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, HEAD / 2);
}

static inline void large_vocabulary(tiny_writer *w) {
    session_model(w, 4);
}

static inline void ok(bn_status status) {
    CHECK_MSG(status == BN_OK, "%s", bn_status_text(status));
}

/* Open the model with two threads and draw a prompt; returns its file, to be freed after the
 * model. */
static inline uint8_t *open_large_vocabulary(bn_model **model, int32_t prompt[PROMPT],
                                             size_t *size) {
    uint8_t *file = tiny_file(large_vocabulary, SIZE_MAX, SIZE_MAX, size);
    const bn_load_options options = {.threads = 2};
    uint64_t random = 1;
    char detail[BN_DETAIL_SIZE] = "";
    const bn_status status = bn_model_open_bytes(file, *size, &options, model, detail);
    CHECK_MSG(status == BN_OK, "%s", detail);
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (int32_t)check_below(&random, VOCAB);
    return file;
}

/* A session that holds the prompt, with a seed set. */
static inline bn_session *prompted(bn_model *model, const bn_session_options *options,
                                   const int32_t prompt[PROMPT]) {
    bn_session *s;
    ok(bn_session_new(model, options, &s));
    ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_LAST, NULL));
    bn_session_seed(s, 42);
    return s;
}

static inline void same_logits(bn_session *a, bn_session *b) {
    const float *x = bn_session_logits(a), *y = bn_session_logits(b);
    CHECK(x != NULL && y != NULL);
    CHECK(memcmp(x, y, VOCAB * sizeof *x) == 0);
}

#endif
