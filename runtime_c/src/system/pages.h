/* SPDX-License-Identifier: MIT
 *
 * pages.h: large memory blocks, in huge pages where the system has them: fewer page-table walks,
 * and no small pages that evict each other from a cache.
 */
#ifndef BITNET_PAGES_H
#define BITNET_PAGES_H

#include <stddef.h>

enum { BN_HUGE_PAGE = 2 << 20 };

/* The size that bn_pages_new rounds `size` up to. */
size_t bn_pages_size(size_t size);

/* Allocates *size bytes, at most SIZE_MAX - BN_HUGE_PAGE, aligned to 64, and sets *size to the
 * rounded size. NULL: out of memory. Release with free. */
void *bn_pages_new(size_t *size);

/* Allocates zeroed bytes, aligned as by malloc, which the system commits when they are first
 * written, all at once if they are few: if `huge`, a huge page at a time. NULL: out of memory.
 * Release with bn_pages_free and the same size. */
void *bn_pages_grow(size_t size, int huge);
void bn_pages_free(void *bytes, size_t size);

/* Returns the whole pages within these bytes to the system until they are written again; their
 * contents are lost. */
void bn_pages_drop(void *bytes, size_t size);

#endif
