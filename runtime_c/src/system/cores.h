/* SPDX-License-Identifier: MIT
 *
 * cores.h: how many processors this process may keep busy.
 */
#ifndef BITNET_CORES_H
#define BITNET_CORES_H

#include <stdint.h>

/* Hardware threads this process may use at once: its affinity, and the cgroup CPU quota rounded
 * down; at least 1. More threads than this only time-share. */
int32_t bn_usable_cpus(void);

/* The CPU quota of the cgroups named in `membership` (the text of /proc/self/cgroup), the lowest of
 * each group and its ancestors, in processors. 0: no limit. `mount` is /sys/fs/cgroup. */
double bn_cgroup_quota(const char *membership, const char *mount);

#endif
