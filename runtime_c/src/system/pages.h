/* SPDX-License-Identifier: MIT
 *
 * pages.h: memory for what is large, in huge pages where the system has them: fewer walks of the
 * page table, and no small pages that take each other's places in a cache.
 */
#ifndef BITNET_PAGES_H
#define BITNET_PAGES_H

#include <stddef.h>

enum { BN_HUGE_PAGE = 2 << 20 };

/* What bn_pages_new makes of a size. */
size_t bn_pages_size(size_t size);

/* *size bytes, at most SIZE_MAX - BN_HUGE_PAGE, aligned to 64; *size is rounded up to what there
 * is. NULL: no memory. To be freed with free. */
void *bn_pages_new(size_t *size);

/* Bytes of 0, aligned as malloc's, which the system gives when they are written to: if `huge`, as
 * many at a time as a huge page has. NULL: no memory. To be given back with the same numbers. */
void *bn_pages_grow(size_t size, int huge);
void bn_pages_free(void *bytes, size_t size, int huge);

/* Whole pages of them are the system's again until they are written to. */
void bn_pages_drop(void *bytes, size_t size);

#endif
