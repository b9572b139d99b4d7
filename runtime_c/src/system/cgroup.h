/* SPDX-License-Identifier: MIT
 *
 * cgroup.h: Linux control groups, versions 1 and 2, by which containers limit a process.
 */
#ifndef BITNET_CGROUP_H
#define BITNET_CGROUP_H

#include <stddef.h>

/* Reads a small text file, truncated to size - 1 bytes; returns 0 if it is empty or cannot be
 * read. */
int bn_read_text(const char *path, char *text, size_t size);

/* Called with the directory of one group, of version 1 or 2. It may not be visible to this process;
 * then its files cannot be read. */
typedef void (*bn_cgroup_visitor)(const char *directory, int version, void *context);

/* Visits the groups with this controller that `membership` (the text of /proc/self/cgroup) names,
 * and their ancestors up to the mount: a limit applies to all descendants, and a container may see
 * only the last one visited. `mount` is /sys/fs/cgroup. */
void bn_cgroup_visit(const char *membership, const char *mount, const char *controller,
                     bn_cgroup_visitor visit, void *context);

#endif
