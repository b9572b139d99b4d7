/* SPDX-License-Identifier: MIT
 *
 * pages.h: memory for what is large, in huge pages where the system has them.
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

#endif
