/* SPDX-License-Identifier: MIT
 *
 * memory.h: how much memory this process can have, so that what cannot fit is refused before any
 * work, with numbers, and not ended by the system half-way.
 */
#ifndef BITNET_MEMORY_H
#define BITNET_MEMORY_H

#include <stdint.h>

typedef struct bn_memory {
    uint64_t bytes;
    const char *limit; /* what sets them, in words; static storage */
} bn_memory;

/* What bytes are to be had for. */
typedef enum bn_memory_use {
    BN_MEMORY_OWN, /* allocated: what is free, or can be made free, now */
    BN_MEMORY_MAP  /* a file mapped to be read: the system keeps what it has room for, and without
                    * room for all would read the rest anew for each token */
} bn_memory_use;

/* The least of what RLIMIT_AS, RLIMIT_DATA, the groups of this process and the machine leave.
 * Exact if below `enough`; otherwise at least that, at less cost. Swap counts as the machine's; in
 * a group it may be forbidden. `root` is before /proc and /sys: "". */
bn_memory bn_memory_left(const char *root, bn_memory_use use, uint64_t enough);

#endif
