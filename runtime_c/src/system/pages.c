/* SPDX-License-Identifier: MIT
 *
 * pages.c: see pages.h.
 */
#define _GNU_SOURCE /* madvise, MAP_ANONYMOUS */

#include "pages.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t alignment(size_t size) {
    return size < BN_HUGE_PAGE ? 64 : BN_HUGE_PAGE;
}

size_t bn_pages_size(size_t size) {
    const size_t align = alignment(size);
    return (size + align - 1) / align * align;
}

/* Only a hint to the kernel. */
static void in_huge_pages(void *bytes, size_t size) {
#if defined(MADV_HUGEPAGE)
    (void)madvise(bytes, size, MADV_HUGEPAGE);
#else
    (void)bytes, (void)size;
#endif
}

void *bn_pages_new(size_t *size) {
    const size_t align = alignment(*size);
    *size = bn_pages_size(*size);
    void *bytes = aligned_alloc(align, *size);
    if (bytes != NULL && align == BN_HUGE_PAGE)
        in_huge_pages(bytes, *size);
    return bytes;
}

/* calloc clears memory that was used and freed before, and so commits all of it at once. Below this
 * size that is less than what a mapping wastes. */
enum { LEAST_MAPPED = 128 << 10 };

void *bn_pages_grow(size_t size, int huge) {
    if (size < LEAST_MAPPED)
        return calloc(1, size);
    void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED)
        return NULL;
    if (huge)
        in_huge_pages(bytes, size);
    return bytes;
}

void bn_pages_drop(void *bytes, size_t size) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)bytes;
    const uintptr_t first = (at + page - 1) / page * page, end = (at + size) / page * page;
    if (first < end)
        (void)madvise((void *)first, end - first, MADV_DONTNEED);
}

void bn_pages_free(void *bytes, size_t size) {
    if (size < LEAST_MAPPED)
        free(bytes);
    else if (bytes != NULL)
        (void)munmap(bytes, size);
}
