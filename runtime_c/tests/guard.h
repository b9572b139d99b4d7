/* SPDX-License-Identifier: MIT
 *
 * guard.h: buffers that detect out-of-bounds access. A buffer starts right after, or ends right
 * before, a page that faults on any access; the rest of its own pages holds a pattern that must
 * survive.
 */
#ifndef BITNET_GUARD_H
#define BITNET_GUARD_H

#include "check.h"

#include <sys/mman.h>
#include <unistd.h>

enum { GUARD_POISON = 0xA5, GUARD_MAX = 16 };

typedef struct guard_buffer {
    uint8_t *map, *pages, *data; /* whole mapping, its accessible part, the buffer */
    size_t map_size, pages_size, size;
} guard_buffer;

typedef struct guard {
    guard_buffer buffer[GUARD_MAX];
    int n;
} guard;

/* `size` poisoned bytes at a random end of their pages. At the far end the address is a multiple of
 * any power of two that divides `size`. */
static void *guard_new(guard *g, size_t size, uint64_t *random) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    CHECK(g->n < GUARD_MAX);
    guard_buffer *b = &g->buffer[g->n++];
    b->size = size;
    b->pages_size = (size + page - 1) / page * page;
    b->map_size = b->pages_size + 2 * page;
    b->map = mmap(NULL, b->map_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(b->map != MAP_FAILED);
    b->pages = b->map + page;
    CHECK(b->pages_size == 0 || mprotect(b->pages, b->pages_size, PROT_READ | PROT_WRITE) == 0);
    memset(b->pages, GUARD_POISON, b->pages_size);
    b->data = b->pages + (check_below(random, 2) ? b->pages_size - size : 0);
    return b->data;
}

/* Check for writes around all buffers, then free them. */
static void guard_release(guard *g, const char *what) {
    for (; g->n > 0; g->n--) {
        guard_buffer *b = &g->buffer[g->n - 1];
        const size_t before = (size_t)(b->data - b->pages);
        for (size_t i = 0; i < b->pages_size; i++)
            if (i < before || i >= before + b->size)
                CHECK_MSG(b->pages[i] == GUARD_POISON, "%s wrote outside a buffer of %zu bytes",
                          what, b->size);
        CHECK(munmap(b->map, b->map_size) == 0);
    }
}

#endif
