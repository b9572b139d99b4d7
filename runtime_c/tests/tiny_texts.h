/* SPDX-License-Identifier: MIT
 *
 * tiny_texts.h: small stacks that take tokens or the output of another stack, and drafts.
 */
#ifndef BITNET_TINY_TEXTS_H
#define BITNET_TINY_TEXTS_H

#include "tiny_tensors.h"

/* A decoder that the engine can run: pre-norms, sub-norms, RoPE, gated relu², tied int8
 * embedding. */
static inline void tiny_decoder(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[2] = 19,
                                [3] = 24,
                                [4] = 2,
                                [5] = 2,
                                [6] = 1,
                                [7] = 8,
                                [8] = 20,
                                [9] = 32,
                                [12] = 1 | 4 | TINY_FINAL_NORM,
                                [13] = tiny_float_bits(1e-5f),
                                [19] = one,
                                [21] = 1,
                                [22] = one,
                                [23] = one,
                                [24] = tiny_float_bits(0.35f),
                                [28] = 1,
                                [29] = 8};
    tiny_stack(w, words, "decoder");
    for (unsigned layer = 0; layer < 2; layer++) {
        tiny_tensor(w, layer, 1, TINY_NONE, 0, 1, 0, 1, 24);
        tiny_tensor(w, layer, 2, TINY_NONE, 0, 4, 1, 16, 24);
        tiny_tensor(w, layer, 3, TINY_NONE, 0, 4, 1, 8, 24);
        tiny_tensor(w, layer, 4, TINY_NONE, 0, 4, 2, 8, 24);
        tiny_tensor(w, layer, 7, TINY_NONE, 0, 1, 0, 1, 16);
        tiny_tensor(w, layer, 8, TINY_NONE, 0, 4, 3, 24, 16);
        tiny_tensor(w, layer, 10, TINY_NONE, 0, 1, 0, 1, 24);
        tiny_tensor(w, layer, 12, TINY_NONE, 0, 4, 1, 20, 24);
        tiny_tensor(w, layer, 13, TINY_NONE, 0, 5, 1, 20, 24);
        tiny_tensor(w, layer, 14, TINY_NONE, 0, 1, 0, 1, 20);
        tiny_tensor(w, layer, 15, TINY_NONE, 0, 4, 1, 24, 20);
    }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 19, 24);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 24);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, 4);
}

/* A mixture of three experts, of which a token takes two; each has a different encoding. */
static inline void tiny_mixture(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {
        [2] = 19, [3] = 24,       [4] = 2,    [5] = 2,    [6] = 1,  [7] = 8,    [8] = 20,
        [9] = 32, [12] = 4 | 256, [13] = one, [16] = 3,   [17] = 2, [19] = one, [20] = 4,
        [21] = 1, [22] = one,     [23] = one, [24] = one, [28] = 1, [29] = 8};
    const unsigned gate[] = {1, 4, 5}, up[] = {7, 2, 6}, down[] = {8, 6, 1};
    const unsigned scope[] = {[4] = 1, [5] = 1, [6] = 2, [7] = 1, [8] = 2};
    tiny_stack(w, words, "mixture");
    for (unsigned layer = 0; layer < 2; layer++) {
        tiny_tensor(w, layer, 2, TINY_NONE, 0, 4, 1, 16, 24);
        tiny_tensor(w, layer, 3, TINY_NONE, 0, 4, 1, 8, 24);
        tiny_tensor(w, layer, 4, TINY_NONE, 0, 4, 3, 8, 24);
        tiny_tensor(w, layer, 7, TINY_NONE, 0, 1, 0, 1, 16);
        tiny_tensor(w, layer, 8, TINY_NONE, 0, 4, 1, 24, 16);
        tiny_tensor(w, layer, 11, TINY_NONE, 0, 1 + layer, 0, 3, 24);
        for (unsigned e = 0; e < 3; e++)
            tiny_with_bias(w, layer, 12, e, gate[e], scope[gate[e]], 20, 24);
        for (unsigned e = 0; e < 3; e++)
            tiny_with_bias(w, layer, 13, e, up[e], scope[up[e]], 20, 24);
        for (unsigned e = 0; e < 3; e++)
            tiny_tensor(w, layer, 14, e, 0, 1, 0, 1, 20);
        for (unsigned e = 0; e < 3; e++)
            tiny_with_bias(w, layer, 15, e, down[e], scope[down[e]], 24, 20);
    }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 19, 24);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 24);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, 4);
}

/* A decoder like the transformer of 2017: a LayerNorm of the input and of each sum, none at the
 * end, learned positions, no gate, every bias, a separate head. */
static inline void tiny_original(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[2] = 19,
                                [3] = 24,
                                [4] = 2,
                                [5] = 2,
                                [6] = 2,
                                [7] = 9,
                                [8] = 20,
                                [9] = 270,
                                [11] = 1,
                                [12] = 16 | 64 | 128,
                                [13] = tiny_float_bits(1e-5f),
                                [14] = 1,
                                [15] = 4,
                                [18] = 1,
                                [19] = one,
                                [20] = 15,
                                [22] = tiny_float_bits(2.5f),
                                [23] = one,
                                [24] = tiny_float_bits(0.3f),
                                [28] = 1};
    tiny_stack(w, words, "original");
    for (unsigned layer = 0; layer < 2; layer++) {
        tiny_with_bias(w, layer, 2, TINY_NONE, 4, 1, 18, 24);
        tiny_with_bias(w, layer, 3, TINY_NONE, 4, 2, 18, 24);
        tiny_with_bias(w, layer, 4, TINY_NONE, 6, 2, 18, 24);
        tiny_with_bias(w, layer, 8, TINY_NONE, 1, 0, 24, 18);
        tiny_with_bias(w, layer, 9, TINY_NONE, 1, 0, 1, 24);
        tiny_with_bias(w, layer, 13, TINY_NONE, 5, 1, 20, 24);
        tiny_with_bias(w, layer, 15, TINY_NONE, 4, 3, 24, 20);
        tiny_with_bias(w, layer, 16, TINY_NONE, 1, 0, 1, 24);
    }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 19, 24);
    tiny_tensor(w, TINY_NONE, 65, TINY_NONE, 0, 2, 0, 270, 24);
    tiny_with_bias(w, TINY_NONE, 67, TINY_NONE, 2, 0, 19, 24);
    tiny_with_bias(w, TINY_NONE, 68, TINY_NONE, 1, 0, 1, 24);
}

/* A stack with nothing optional: embeddings in, hidden states out. */
static inline void tiny_bare(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[0] = 1,    [1] = 1,    [3] = 8,    [4] = 1,    [5] = 1,  [6] = 1,
                                [7] = 3,    [8] = 5,    [9] = 7,    [13] = one, [14] = 1, [18] = 3,
                                [19] = one, [22] = one, [23] = one, [24] = one, [27] = 2};
    tiny_stack(w, words, "bare");
    tiny_tensor(w, 0, 2, TINY_NONE, 0, 4, 1, 3, 8);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 2, 0, 3, 8);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 1, 0, 3, 8);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, 8, 3);
    tiny_tensor(w, 0, 13, TINY_NONE, 0, 4, 1, 5, 8);
    tiny_tensor(w, 0, 15, TINY_NONE, 0, 4, 1, 8, 5);
}

/* A draft for the stack before it, with the same width. */
static inline void tiny_draft(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[0] = 3,    [3] = 8,    [4] = 1,
                                [5] = 1,    [6] = 1,    [7] = 3,
                                [8] = 5,    [9] = 7,    [12] = TINY_FINAL_NORM,
                                [13] = one, [14] = 1,   [18] = 3,
                                [19] = one, [22] = one, [23] = one,
                                [24] = one};
    tiny_stack(w, words, "draft");
    tiny_tensor(w, 0, 2, TINY_NONE, 0, 4, 1, 3, 8);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 4, 1, 3, 8);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 4, 1, 3, 8);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, 8, 3);
    tiny_tensor(w, 0, 13, TINY_NONE, 0, 4, 1, 5, 8);
    tiny_tensor(w, 0, 15, TINY_NONE, 0, 4, 1, 8, 5);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 8);
    tiny_tensor(w, TINY_NONE, 71, TINY_NONE, 0, 1, 0, 1, 8);
    tiny_tensor(w, TINY_NONE, 72, TINY_NONE, 0, 1, 0, 1, 8);
    tiny_tensor(w, TINY_NONE, 73, TINY_NONE, 0, 4, 2, 8, 16);
}

/* A text stack with a draft; q and down have adapters of rank 3, which may also be in a separate
 * file. */
static inline void tiny_drafting(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[2] = 19,
                                [3] = 8,
                                [4] = 1,
                                [5] = 1,
                                [6] = 1,
                                [7] = 3,
                                [8] = 5,
                                [9] = 7,
                                [12] = 256,
                                [13] = one,
                                [14] = 1,
                                [18] = 3,
                                [19] = one,
                                [21] = 1,
                                [22] = one,
                                [23] = one,
                                [24] = one,
                                [28] = 1,
                                [47] = 3 | 65u << 16};
    tiny_stack(w, words, "drafting");
    tiny_with_adapter(w, 2, 3, 8);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 2, 0, 3, 8);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 4, 1, 3, 8);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, 8, 3);
    tiny_tensor(w, 0, 13, TINY_NONE, 0, 4, 1, 5, 8);
    tiny_with_adapter(w, 15, 8, 5);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 19, 8);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 8);
    tiny_draft(w);
}

#endif
