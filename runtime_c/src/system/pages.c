/* SPDX-License-Identifier: MIT
 *
 * pages.c: see pages.h.
 */
#define _GNU_SOURCE /* madvise */

#include "pages.h"

#include <stdlib.h>
#include <sys/mman.h>

static size_t alignment(size_t size) {
    return size < BN_HUGE_PAGE ? 64 : BN_HUGE_PAGE;
}

size_t bn_pages_size(size_t size) {
    const size_t align = alignment(size);
    return (size + align - 1) / align * align;
}

void *bn_pages_new(size_t *size) {
    const size_t align = alignment(*size);
    *size = bn_pages_size(*size);
    void *bytes = aligned_alloc(align, *size);
#if defined(MADV_HUGEPAGE) /* a hint: fewer walks of the page table, and no small pages that take  \
                            * each other's places in a cache */
    if (bytes != NULL && align == BN_HUGE_PAGE)
        (void)madvise(bytes, *size, MADV_HUGEPAGE);
#endif
    return bytes;
}
