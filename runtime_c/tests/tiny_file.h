/* SPDX-License-Identifier: MIT
 *
 * tiny_file.h: small valid packed files, written here byte by byte from export/FORMAT.md and not
 * from the reader's structures, so that the two hold each other. Weights are random; so are
 * padding codes, which change no result. Include it after _POSIX_C_SOURCE is defined
 * (posix_memalign).
 */
#ifndef BITNET_TINY_FILE_H
#define BITNET_TINY_FILE_H

#include <math.h>

#include "check.h"
#include "kernels/kernels.h"

typedef struct tiny_writer {
    uint8_t *stacks, *tensors, *data;
    size_t n_stacks, n_tensors, data_size; /* records, records, bytes */
    size_t skip, twice;                    /* number of a tensor to leave out, to write twice */
    size_t added;                          /* tensors asked for */
    int alone;                             /* 1: of an adapter alone, only its tensors are kept */
    uint64_t random;
} tiny_writer;

enum { TINY_FINAL_NORM = 256 }; /* of norm_flags */
enum { TINY_MAX_STACKS = 17, TINY_MAX_TENSORS = 512, TINY_MAX_DATA = 1 << 21 };
#define TINY_NONE 0xFFFFu /* no layer, no expert */

static inline void tiny_put(uint8_t *p, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        p[i] = (uint8_t)(value >> 8 * i);
}

static inline uint64_t tiny_get(const uint8_t *p, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++)
        value |= (uint64_t)p[i] << 8 * i;
    return value;
}

static inline uint32_t tiny_float_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline size_t tiny_align(size_t n) {
    return (n + 63) / 64 * 64;
}

static inline uint32_t tiny_crc(const uint8_t *p, size_t n) {
    bn_kernels kernels;
    bn_kernels_scalar(&kernels);
    return kernels.bytes.crc32(0, p, n);
}

/* A random F32 near `around`, a random F16, a tile byte. */
static inline void tiny_fill(tiny_writer *w, uint8_t *p, size_t size, unsigned encoding,
                             float around) {
    for (size_t i = 0; i < size; i++) {
        const uint64_t r = check_random(&w->random);
        if (encoding == 4 || encoding == 7 || encoding == 8) /* four codes of 0, 1, 2 */
            p[i] = (uint8_t)(r % 3 | r / 3 % 3 << 2 | r / 9 % 3 << 4 | r / 27 % 3 << 6);
        else if (encoding == 5) /* five codes in a byte */
            p[i] = (uint8_t)((256 * (r % 243) + 242) / 243);
        else if (encoding == 6) /* a code, not -128 */
            p[i] = (uint8_t)(r % 255 - 127);
        else if (encoding == 2 && i % 2 == 0) /* +-[0.125, 0.25) */
            tiny_put(p + i, 0x3000 | (r & 0x83FF), 2);
        else if (encoding == 1 && i % 4 == 0)
            tiny_put(p + i, tiny_float_bits(around + 0.1f * check_float(&w->random)), 4);
    }
}

static inline size_t tiny_sketch_size(size_t rows, size_t cols) {
    return 64 * (rows * ((cols + 63) / 64) + (rows + 15) / 16 * ((cols + 15) / 16 + 2));
}

/* Random codes, and of each row the sketch, its step and its deviation (FORMAT.md §4). */
static inline void tiny_fill_sketch(tiny_writer *w, uint8_t *p, size_t rows, size_t cols) {
    const size_t stride = (cols + 63) / 64 * 64, tiles = (cols + 15) / 16;
    uint8_t *sketch = p + rows * stride, *step = sketch + 64 * ((rows + 15) / 16 * tiles);
    uint8_t *deviation = step + 64 * ((rows + 15) / 16);
    memset(p, 0, tiny_sketch_size(rows, cols));
    for (size_t r = 0; r < rows; r++) {
        const int8_t *c = (const int8_t *)p + r * stride;
        double squares = 0, left = 0;
        tiny_fill(w, p + r * stride, cols, 6, 0);
        for (size_t k = 0; k < cols; k++)
            squares += c[k] * c[k];
        const double t = fmax(1, rint(sqrt(squares / (double)cols)));
        for (size_t k = 0; k < cols; k++) {
            const int s = c[k] >= t ? 3 : c[k] >= 0 ? 2 : c[k] > -t ? 1 : 0;
            left += (c[k] - (s - 1.5) * t) * (c[k] - (s - 1.5) * t);
            sketch[(r / 16 * tiles + k / 16) * 64 + r % 16 * 4 + k % 4] |=
                (uint8_t)(s << k % 16 / 4 * 2);
        }
        tiny_put(step + 4 * r, tiny_float_bits((float)t), 4);
        tiny_put(deviation + 4 * r, tiny_float_bits((float)sqrt(left / (double)cols)), 4);
    }
}

/* Add a tensor with random content. encoding 1 F32, 2 F16, 4 ternary of 2 bits, 5 of 1.6 bits,
 * 6 int8, 7 and 8 lines of rows and of columns, 9 int8 with a sketch; scope 0 none, 1 tensor,
 * 2 row, 3 group. */
static inline void tiny_tensor(tiny_writer *w, unsigned layer, unsigned role, unsigned expert,
                               unsigned part, unsigned encoding, unsigned scope, size_t rows,
                               size_t cols) {
    const size_t number = w->added++;
    const int norm = role < 64 && encoding == 1 && rows == 1 && part == 0;
    size_t size = encoding == 4   ? 64 * ((rows + 15) / 16) * ((cols + 15) / 16)
                  : encoding == 5 ? 64 * ((rows + 15) / 16) * ((cols + 19) / 20)
                  : encoding == 6 ? 64 * rows * ((cols + 63) / 64)
                  : encoding == 7 ? 64 * rows * ((cols + 255) / 256)
                  : encoding == 8 ? 64 * cols * ((rows + 255) / 256)
                  : encoding == 9 ? tiny_sketch_size(rows, cols)
                  : encoding == 2 ? 2 * rows * cols
                                  : 4 * rows * cols;
    const size_t panels = (rows + 15) / 16, groups = (cols + 127) / 128;
    const size_t scale_sizes[] = {0, 4, 4 * rows, 2 * 16 * panels * groups};
    const size_t scale_size = scale_sizes[scope];
    if (number == w->skip || (w->alone && part < 2))
        return;
    for (int copies = number == w->twice ? 2 : 1; copies > 0; copies--) {
        uint8_t *r = w->tensors + 64 * w->n_tensors++;
        CHECK(w->n_tensors <= TINY_MAX_TENSORS);
        size_t offset = tiny_align(w->data_size), scale_offset = tiny_align(offset + size);
        w->data_size = scale_size ? scale_offset + scale_size : offset + size;
        CHECK(w->data_size <= TINY_MAX_DATA);
        tiny_fill(w, w->data + offset, size, encoding, norm ? 1.0f : 0.2f);
        if (encoding == 9)
            tiny_fill_sketch(w, w->data + offset, rows, cols);
        tiny_fill(w, w->data + scale_offset, scale_size, scope == 3 ? 2 : 1, 0.3f);
        for (size_t i = 1; i < scale_size && scope == 3; i += 2)
            w->data[scale_offset + i] &= 0x7F; /* scales are > 0 */
        tiny_put(r, w->n_stacks - 1, 2);
        tiny_put(r + 2, layer, 2);
        tiny_put(r + 4, role, 2);
        tiny_put(r + 6, expert, 2);
        r[8] = (uint8_t)part;
        r[9] = (uint8_t)encoding;
        r[10] = (uint8_t)scope;
        tiny_put(r + 16, rows, 4);
        tiny_put(r + 20, cols, 4);
        tiny_put(r + 24, offset, 8);
        tiny_put(r + 32, size, 8);
        tiny_put(r + 40, scale_size ? scale_offset : 0, 8);
        tiny_put(r + 48, scale_size, 8);
    }
}

/* Begin a stack; `words` are those of its record, before the name. */
static inline void tiny_stack(tiny_writer *w, const uint32_t words[48], const char *name) {
    uint8_t *record = w->stacks + 256 * w->n_stacks++;
    CHECK(w->n_stacks <= TINY_MAX_STACKS);
    for (size_t i = 0; i < 48; i++)
        tiny_put(record + 4 * i, words[i], 4);
    memcpy(record + 192, name, strlen(name));
}

/* What the engine runs: pre-norms, sub-norms, RoPE, gated relu², tied int8 embedding. */
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

static inline void tiny_with_bias(tiny_writer *w, unsigned layer, unsigned role, unsigned expert,
                                  unsigned encoding, unsigned scope, size_t rows, size_t cols) {
    tiny_tensor(w, layer, role, expert, 0, encoding, scope, rows, cols);
    tiny_tensor(w, layer, role, expert, 1, 1, 0, 1, encoding == 1 && rows == 1 ? cols : rows);
}

/* A decoder whose second layer half is three experts, of which a token takes two; each is stored in
 * another way. */
static inline void tiny_mixture(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {
        [2] = 19, [3] = 24,       [4] = 2,    [5] = 2,    [6] = 1,  [7] = 8,    [8] = 20,
        [9] = 32, [12] = 4 | 256, [13] = one, [16] = 3,   [17] = 2, [19] = one, [20] = 4,
        [21] = 1, [22] = one,     [23] = one, [24] = one, [28] = 1, [29] = 8};
    const unsigned gate[] = {4, 1, 5}, up[] = {7, 2, 6}, down[] = {8, 6, 1};
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

/* A decoder after the transformer of 2017: a LayerNorm of what enters and of each sum, none at the
 * end, learned positions, no gate, every bias, a head of its own. */
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

/* A stack that has nothing optional: embeddings in, hidden states out. */
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

static inline void tiny_with_adapter(tiny_writer *w, unsigned role, size_t rows, size_t cols) {
    tiny_tensor(w, 0, role, TINY_NONE, 0, 6, 2, rows, cols);
    tiny_tensor(w, 0, role, TINY_NONE, 2, 2, 0, 3, cols);
    tiny_tensor(w, 0, role, TINY_NONE, 3, 2, 0, 3, rows);
}

/* An encoder of images: 5 x 5 pixels of two channels, four patches of 2 x 2 and a class token, a
 * norm behind each addition, a head that pools by attention, a projector; int8 linears of which q
 * and down have adapters of rank 3. */
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

/* An encoder of images that the engine runs: 8 x 8 pixels of two channels, four patches of 3 x 3
 * and a rest, a class token, LayerNorms, every bias, a head that pools by attention, a projector.
 */
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

/* A decoder that sees: behind it in the file is its encoder of images. */
static inline void tiny_seeing(tiny_writer *w) {
    tiny_decoder(w);
    tiny_put(w->stacks + 4 * 1, 2, 4);   /* mask: prefix */
    tiny_put(w->stacks + 4 * 46, 18, 4); /* image token */
    tiny_vision(w, 24);
}

/* A draft of the stack before it, which has its width. */
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

/* Of text, with a draft behind it; q and down have adapters of rank 3, which may also lie in a file
 * of their own. */
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

/* Everything the format can say: every norm, every bias, two experts, learned positions, a head
 * of its own; then stacks that have none of it, of images, of a draft. */
static inline void tiny_everything(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {
        [2] = 21,   [3] = 130,  [4] = 2,    [5] = 4,    [6] = 2,    [7] = 4,
        [8] = 33,   [9] = 5,    [10] = 3,   [11] = 1,   [12] = 447, [13] = one,
        [15] = 2,   [16] = 2,   [17] = 1,   [18] = 1,   [19] = one, [20] = 15,
        [22] = one, [23] = one, [24] = one, [25] = one, [26] = one, [28] = 1};
    tiny_stack(w, words, "everything");
    for (unsigned l = 0; l < 2; l++) {
        tiny_with_bias(w, l, 1, TINY_NONE, 1, 0, 1, 130);
        tiny_with_bias(w, l, 2, TINY_NONE, 4, 3, 16, 130); /* two groups of 128 along K */
        tiny_with_bias(w, l, 3, TINY_NONE, 2, 0, 8, 130);
        tiny_with_bias(w, l, 4, TINY_NONE, 1, 0, 8, 130);
        tiny_with_bias(w, l, 5, TINY_NONE, 1, 0, 1, 4);
        tiny_with_bias(w, l, 6, TINY_NONE, 1, 0, 1, 4);
        tiny_with_bias(w, l, 7, TINY_NONE, 1, 0, 1, 16);
        tiny_with_bias(w, l, 8, TINY_NONE, 4, 2, 130, 16);
        tiny_with_bias(w, l, 9, TINY_NONE, 1, 0, 1, 130);
        tiny_with_bias(w, l, 10, TINY_NONE, 1, 0, 1, 130);
        tiny_tensor(w, l, 11, TINY_NONE, 0, 2, 0, 2, 130);
        for (unsigned e = 0; e < 2; e++)
            tiny_with_bias(w, l, 12, e, 4, 1, 33, 130);
        for (unsigned e = 0; e < 2; e++)
            tiny_with_bias(w, l, 13, e, 5, 2, 33, 130);
        for (unsigned e = 0; e < 2; e++)
            tiny_with_bias(w, l, 14, e, 1, 0, 1, 33);
        for (unsigned e = 0; e < 2; e++)
            tiny_with_bias(w, l, 15, e, 4, 3, 130, 33);
        tiny_with_bias(w, l, 16, TINY_NONE, 1, 0, 1, 130);
        for (unsigned r = 2; r <= 4; r++)
            tiny_with_bias(w, l, 32 + r, TINY_NONE, 1, 0, 1, 130);
        tiny_with_bias(w, l, 32 + 8, TINY_NONE, 1, 0, 1, 16);
        for (unsigned r = 12; r <= 13; r++)
            for (unsigned e = 0; e < 2; e++)
                tiny_with_bias(w, l, 32 + r, e, 1, 0, 1, 130);
        for (unsigned e = 0; e < 2; e++)
            tiny_with_bias(w, l, 32 + 15, e, 1, 0, 1, 33);
    }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 2, 0, 21, 130);
    tiny_tensor(w, TINY_NONE, 65, TINY_NONE, 0, 1, 0, 5, 130);
    tiny_with_bias(w, TINY_NONE, 66, TINY_NONE, 1, 0, 1, 130);
    tiny_with_bias(w, TINY_NONE, 67, TINY_NONE, 9, 2, 21, 130);
    tiny_with_bias(w, TINY_NONE, 68, TINY_NONE, 1, 0, 1, 130);
    tiny_bare(w);
    tiny_images(w);
    tiny_draft(w);
}

/* Memory of exactly `size` bytes at a multiple of 64, so that a sanitizer sees the first byte
 * past the end. Release with free. */
static inline uint8_t *tiny_alloc(size_t size) {
    void *p = NULL;
    CHECK(posix_memalign(&p, 64, size ? size : 1) == 0);
    return p;
}

static inline uint8_t *tiny_copy(const uint8_t *bytes, size_t size) {
    uint8_t *copy = tiny_alloc(size);
    memcpy(copy, bytes, size);
    return copy;
}

/* Make every checksum right, as someone who forges a file would. Safe on any bytes. */
static inline void tiny_fix_checksums(uint8_t *bytes, size_t size) {
    if (size < 64)
        return;
    const uint64_t count = tiny_get(bytes + 24, 4);
    if (count > (size - 64) / 32)
        return;
    for (size_t i = 0; i < count; i++) {
        uint8_t *entry = bytes + 64 + 32 * i;
        const uint64_t offset = tiny_get(entry + 8, 8), n = tiny_get(entry + 16, 8);
        if (offset <= size && n <= size - offset)
            tiny_put(entry + 4, tiny_crc(bytes + offset, (size_t)n), 4);
    }
    uint8_t *head = tiny_alloc(60 + 32 * (size_t)count);
    memcpy(head, bytes, 60);
    memcpy(head + 60, bytes + 64, 32 * (size_t)count);
    tiny_put(bytes + 60, tiny_crc(head, 60 + 32 * (size_t)count), 4);
    free(head);
}

/* Lay the file out. The caller frees the bytes; the writer is freed here. */
static inline uint8_t *tiny_finish(tiny_writer *w, size_t *size) {
    static const char metadata[] = "{\"format\": \"bitnet-edge\"}";
    const struct {
        uint32_t kind;
        const void *bytes;
        size_t size;
    } sections[] = {{1, w->stacks, 256 * w->n_stacks},
                    {2, w->tensors, 64 * w->n_tensors},
                    {3, metadata, sizeof metadata - 1},
                    {6, w->data, w->data_size}};
    enum { N = sizeof sections / sizeof *sections };
    size_t end = tiny_align(64 + 32 * N);
    for (size_t i = 0; i < N; i++)
        end += tiny_align(sections[i].size);
    uint8_t *bytes = tiny_alloc(end);
    memset(bytes, 0, end);
    memcpy(bytes,
           "\x89"
           "BITNET\n",
           8);
    tiny_put(bytes + 8, 3, 4);
    tiny_put(bytes + 16, end, 8);
    tiny_put(bytes + 24, N, 4);
    size_t offset = tiny_align(64 + 32 * N);
    for (size_t i = 0; i < N; i++) {
        uint8_t *entry = bytes + 64 + 32 * i;
        tiny_put(entry, sections[i].kind, 4);
        tiny_put(entry + 8, offset, 8);
        tiny_put(entry + 16, sections[i].size, 8);
        memcpy(bytes + offset, sections[i].bytes, sections[i].size);
        offset += tiny_align(sections[i].size);
    }
    tiny_fix_checksums(bytes, end);
    free(w->stacks);
    free(w->tensors);
    free(w->data);
    *size = end;
    return bytes;
}

static inline void tiny_begin(tiny_writer *w) {
    CHECK(w->stacks = calloc(TINY_MAX_STACKS, 256));
    CHECK(w->tensors = calloc(TINY_MAX_TENSORS, 64));
    CHECK(w->data = calloc(TINY_MAX_DATA, 1));
}

/* A whole file by one of the recipes above, with tensor number `skip` left out and number
 * `twice` written twice (SIZE_MAX: none). */
static inline uint8_t *tiny_file(void (*recipe)(tiny_writer *), size_t skip, size_t twice,
                                 size_t *size) {
    tiny_writer w = {.skip = skip, .twice = twice, .random = 1};
    tiny_begin(&w);
    recipe(&w);
    return tiny_finish(&w, size);
}

/* Offset of a section's entry in the table, and of its first byte. */
static inline size_t tiny_entry(const uint8_t *bytes, uint32_t kind) {
    size_t entry = 64;
    while (tiny_get(bytes + entry, 4) != kind)
        entry += 32;
    return entry;
}

static inline size_t tiny_section(const uint8_t *bytes, uint32_t kind) {
    return (size_t)tiny_get(bytes + tiny_entry(bytes, kind) + 8, 8);
}

/* A file of what a recipe says of adapters, alone: they belong to `model`. */
static inline uint8_t *tiny_adapter(void (*recipe)(tiny_writer *), const uint8_t *model,
                                    uint64_t random, size_t *size) {
    static const uint32_t crc_of[] = {6, 1, 2}; /* DATA, STACKS, TENSORS */
    tiny_writer w = {.skip = SIZE_MAX, .twice = SIZE_MAX, .alone = 1, .random = random};
    tiny_begin(&w);
    recipe(&w);
    uint8_t *bytes = tiny_finish(&w, size);
    tiny_put(bytes + 12, 1, 4);
    memcpy(bytes + 28, model + tiny_entry(model, 6) + 16, 8); /* the size of DATA */
    for (size_t i = 0; i < 3; i++)
        memcpy(bytes + 36 + 4 * i, model + tiny_entry(model, crc_of[i]) + 4, 4);
    tiny_fix_checksums(bytes, *size);
    return bytes;
}

#endif
