/* SPDX-License-Identifier: MIT
 *
 * tiny_images.h: small vision stacks.
 */
#ifndef BITNET_TINY_IMAGES_H
#define BITNET_TINY_IMAGES_H

#include "tiny_tensors.h"

/* An image encoder: 5 x 5 pixels of two channels, four patches of 2 x 2 and a class token, a norm
 * after each addition, attention pooling, a projector; int8 linears, of which q and down have
 * adapters of rank 3. */
static inline void tiny_images(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[0] = 2,
                                [1] = 1,
                                [3] = 8,
                                [4] = 1,
                                [5] = 1,
                                [6] = 1,
                                [7] = 8,
                                [8] = 5,
                                [9] = 5,
                                [12] = 64,
                                [13] = one,
                                [14] = 1,
                                [15] = 4,
                                [18] = 1,
                                [19] = one,
                                [20] = 48,
                                [22] = one,
                                [23] = one,
                                [24] = one,
                                [27] = 4,
                                [33] = 5,
                                [34] = 2,
                                [35] = 2,
                                [36] = one,
                                [39] = one,
                                [40] = one,
                                [42] = 1,
                                [43] = 6,
                                [44] = one,
                                [45] = one,
                                [47] = 3 | 65u << 16};
    tiny_stack(w, words, "images");
    tiny_with_adapter(w, 2, 8, 8);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 6, 2, 8, 8);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 6, 2, 8, 8);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 6, 2, 8, 8);
    tiny_tensor(w, 0, 9, TINY_NONE, 0, 1, 0, 1, 8);
    tiny_tensor(w, 0, 13, TINY_NONE, 0, 6, 2, 5, 8);
    tiny_with_adapter(w, 15, 8, 5);
    tiny_tensor(w, 0, 16, TINY_NONE, 0, 1, 0, 1, 8);
    tiny_tensor(w, TINY_NONE, 65, TINY_NONE, 0, 2, 0, 5, 8);
    tiny_with_bias(w, TINY_NONE, 74, TINY_NONE, 2, 0, 8, 8);
    tiny_tensor(w, TINY_NONE, 75, TINY_NONE, 0, 1, 0, 1, 8);
    tiny_with_bias(w, TINY_NONE, 76, TINY_NONE, 1, 0, 6, 8);
    tiny_tensor(w, TINY_NONE, 80, TINY_NONE, 0, 1, 0, 1, 8);
    for (unsigned role = 81; role <= 84; role++)
        tiny_tensor(w, TINY_NONE, role, TINY_NONE, 0, 4, 1, 8, 8);
    tiny_tensor(w, TINY_NONE, 85, TINY_NONE, 0, 1, 0, 1, 8);
    tiny_tensor(w, TINY_NONE, 86, TINY_NONE, 0, 4, 1, 5, 8);
    tiny_tensor(w, TINY_NONE, 87, TINY_NONE, 0, 4, 1, 8, 5);
}

/* An image encoder that the engine can run: 8 x 8 pixels of two channels, four patches of 3 x 3 and
 * a remainder, a class token, LayerNorms, every bias, attention pooling, a projector. */
static inline void tiny_vision(tiny_writer *w, uint32_t out_dim) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[0] = 2,
                                [1] = 1,
                                [3] = 20,
                                [4] = 2,
                                [5] = 2,
                                [6] = 1,
                                [7] = 9,
                                [8] = 25,
                                [9] = 5,
                                [11] = 1,
                                [12] = 1 | 16 | 128 | TINY_FINAL_NORM,
                                [13] = tiny_float_bits(1e-6f),
                                [14] = 1,
                                [15] = 2,
                                [18] = 1,
                                [19] = one,
                                [20] = 1 | 2 | 4 | 16 | 32,
                                [22] = one,
                                [23] = one,
                                [24] = tiny_float_bits(0.33f),
                                [27] = 4,
                                [33] = 8,
                                [34] = 3,
                                [35] = 2,
                                [36] = tiny_float_bits(0.5f),
                                [37] = tiny_float_bits(0.4f),
                                [39] = tiny_float_bits(0.25f),
                                [40] = tiny_float_bits(0.3f),
                                [42] = 1,
                                [43] = out_dim,
                                [44] = tiny_float_bits(10.0f),
                                [45] = tiny_float_bits(-10.0f)};
    const unsigned encodings[] = {4, 6, 2}, scopes[] = {1, 2, 0};
    tiny_stack(w, words, "vision");
    for (unsigned l = 0; l < 2; l++) {
        tiny_with_bias(w, l, 1, TINY_NONE, 1, 0, 1, 20);
        tiny_with_bias(w, l, 2, TINY_NONE, 4, 1, 18, 20);
        tiny_with_bias(w, l, 3, TINY_NONE, 4, 2, 9, 20);
        tiny_with_bias(w, l, 4, TINY_NONE, 4, 3, 9, 20);
        tiny_with_bias(w, l, 8, TINY_NONE, 4, 1, 20, 18);
        tiny_with_bias(w, l, 10, TINY_NONE, 1, 0, 1, 20);
        tiny_with_bias(w, l, 13, TINY_NONE, 5, 1, 25, 20);
        tiny_with_bias(w, l, 15, TINY_NONE, 4, 1, 20, 25);
    }
    tiny_tensor(w, TINY_NONE, 65, TINY_NONE, 0, 2, 0, 5, 20);
    tiny_with_bias(w, TINY_NONE, 66, TINY_NONE, 1, 0, 1, 20);
    tiny_with_bias(w, TINY_NONE, 68, TINY_NONE, 1, 0, 1, 20);
    tiny_with_bias(w, TINY_NONE, 74, TINY_NONE, 2, 0, 20, 18);
    tiny_tensor(w, TINY_NONE, 75, TINY_NONE, 0, 1, 0, 1, 20);
    if (out_dim > 0)
        tiny_with_bias(w, TINY_NONE, 76, TINY_NONE, 1, 0, out_dim, 20);
    tiny_tensor(w, TINY_NONE, 80, TINY_NONE, 0, 1, 0, 1, 20);
    for (unsigned i = 0; i < 3; i++)
        tiny_with_bias(w, TINY_NONE, 81 + i, TINY_NONE, encodings[i], scopes[i], 18, 20);
    tiny_with_bias(w, TINY_NONE, 84, TINY_NONE, 4, 3, 20, 18);
    tiny_with_bias(w, TINY_NONE, 85, TINY_NONE, 1, 0, 1, 20);
    tiny_with_bias(w, TINY_NONE, 86, TINY_NONE, 4, 1, 25, 20);
    tiny_with_bias(w, TINY_NONE, 87, TINY_NONE, 4, 2, 20, 25);
}

#endif
