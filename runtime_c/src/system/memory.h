/* SPDX-License-Identifier: MIT
 *
 * memory.h: how much memory this process can get, so that a request that cannot fit is refused up
 * front, with numbers, instead of the process being killed half-way.
 */
#ifndef BITNET_MEMORY_H
#define BITNET_MEMORY_H

#include <stdint.h>

typedef struct bn_memory {
    uint64_t bytes;
    const char *limit; /* what limits them, as text; static storage */
} bn_memory;

/* What the memory is for. */
typedef enum bn_memory_use {
    BN_MEMORY_OWN, /* allocated: what is free, or can be made free, now */
    BN_MEMORY_MAP  /* a file mapped for reading: the system caches what fits, and would have to read
                    * the rest again for each token */
} bn_memory_use;

/* The least memory that RLIMIT_AS, RLIMIT_DATA, the control groups of this process and the machine
 * leave. Exact if below `enough`; otherwise at least `enough`, found at less cost. Swap counts for
 * the machine but not for a group, where it may be forbidden. `root` is a prefix of /proc and /sys:
 * "" for the real ones. */
bn_memory bn_memory_left(const char *root, bn_memory_use use, uint64_t enough);

#endif
