/* SPDX-License-Identifier: MIT
 *
 * tiny_file.h: small valid packed files from the stacks of tiny_*.h. Include it after
 * _POSIX_C_SOURCE is defined (posix_memalign).
 */
#ifndef BITNET_TINY_FILE_H
#define BITNET_TINY_FILE_H

#include "tiny_images.h"
#include "tiny_texts.h"

/* A decoder with vision: its image encoder follows it in the file. */
static inline void tiny_seeing(tiny_writer *w) {
    tiny_decoder(w);
    tiny_put(w->stacks + 4 * 1, 2, 4);   /* mask: prefix */
    tiny_put(w->stacks + 4 * 46, 18, 4); /* image token */
    tiny_vision(w, 24);
}

/* Everything the format can express: every norm, every bias, two experts, learned positions, a
 * separate head; then stacks with none of it, for images, and a draft. */
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

/* Exactly `size` bytes at a multiple of 64, so that a sanitizer detects access past the end.
 * Release with free. */
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

/* Recompute all checksums, as someone who forges a file would. Safe on any bytes. */
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

/* Lay out the file. The caller frees the bytes; the writer is freed here. */
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

/* A whole file from one of the recipes, with tensor number `skip` left out and number `twice`
 * written twice (SIZE_MAX: none). */
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

/* A file with only the adapters of a recipe, for `model`. */
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
