/* SPDX-License-Identifier: MIT
 *
 * tiny_tensors.h: stacks and tensors of small packed files, written byte by byte from
 * export/FORMAT.md and not from the reader's structures, so that the two check each other. Weights
 * are random; so are padding codes, which must not affect results.
 */
#ifndef BITNET_TINY_TENSORS_H
#define BITNET_TINY_TENSORS_H

#include <math.h>

#include "check.h"
#include "kernels/kernels.h"

typedef struct tiny_writer {
    uint8_t *stacks, *tensors, *data;
    size_t n_stacks, n_tensors, data_size; /* records, records, bytes */
    size_t skip, twice;                    /* number of a tensor to leave out, or to write twice */
    size_t added;                          /* tensors requested so far */
    int alone;                             /* 1: an adapter alone, keep only its tensors */
    uint64_t random;
} tiny_writer;

enum { TINY_FINAL_NORM = 256 }; /* bit of norm_flags */
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
        if (encoding == 4 || encoding == 7 || encoding == 8) /* four codes 0, 1 or 2 */
            p[i] = (uint8_t)(r % 3 | r / 3 % 3 << 2 | r / 9 % 3 << 4 | r / 27 % 3 << 6);
        else if (encoding == 5) /* five codes per byte */
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

/* For each row of codes the sketch, its step and its deviation (FORMAT.md §4). */
static inline void tiny_sketch(uint8_t *p, size_t rows, size_t cols) {
    const size_t stride = (cols + 63) / 64 * 64, tiles = (cols + 15) / 16;
    uint8_t *sketch = p + rows * stride, *step = sketch + 64 * ((rows + 15) / 16 * tiles);
    uint8_t *deviation = step + 64 * ((rows + 15) / 16);
    memset(sketch, 0, tiny_sketch_size(rows, cols) - rows * stride);
    for (size_t r = 0; r < rows; r++) {
        const int8_t *c = (const int8_t *)p + r * stride;
        double squares = 0, left = 0;
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

static inline void tiny_fill_sketch(tiny_writer *w, uint8_t *p, size_t rows, size_t cols) {
    const size_t stride = (cols + 63) / 64 * 64;
    memset(p, 0, rows * stride);
    for (size_t r = 0; r < rows; r++)
        tiny_fill(w, p + r * stride, cols, 6, 0);
    tiny_sketch(p, rows, cols);
}

/* Add a tensor with random content. encoding 1 F32, 2 F16, 4 ternary with 2 bits, 5 ternary with
 * 1.6 bits, 6 int8, 7 and 8 ternary by rows and by columns, 9 int8 with a sketch; scope 0 none, 1
 * tensor, 2 row, 3 group. */
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

/* Start a stack; `words` is its record without the name. */
static inline void tiny_stack(tiny_writer *w, const uint32_t words[48], const char *name) {
    uint8_t *record = w->stacks + 256 * w->n_stacks++;
    CHECK(w->n_stacks <= TINY_MAX_STACKS);
    for (size_t i = 0; i < 48; i++)
        tiny_put(record + 4 * i, words[i], 4);
    memcpy(record + 192, name, strlen(name));
}

static inline void tiny_with_bias(tiny_writer *w, unsigned layer, unsigned role, unsigned expert,
                                  unsigned encoding, unsigned scope, size_t rows, size_t cols) {
    tiny_tensor(w, layer, role, expert, 0, encoding, scope, rows, cols);
    tiny_tensor(w, layer, role, expert, 1, 1, 0, 1, encoding == 1 && rows == 1 ? cols : rows);
}

static inline void tiny_with_adapter(tiny_writer *w, unsigned role, size_t rows, size_t cols) {
    tiny_tensor(w, 0, role, TINY_NONE, 0, 6, 2, rows, cols);
    tiny_tensor(w, 0, role, TINY_NONE, 2, 6, 2, 3, cols);
    tiny_tensor(w, 0, role, TINY_NONE, 3, 6, 2, 3, rows);
}

#endif
