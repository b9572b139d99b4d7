/* SPDX-License-Identifier: MIT
 *
 * cgroup.h: the control groups of Linux, both versions, by which containers limit a process.
 */
#ifndef BITNET_CGROUP_H
#define BITNET_CGROUP_H

#include <stddef.h>

/* Text of a small file, cut off at size - 1 bytes; returns 0 when it cannot be read. */
int bn_read_text(const char *path, char *text, size_t size);

/* Looks at the directory of one group, of version 1 or 2. It may not be visible here: then its
 * files cannot be read. */
typedef void (*bn_cgroup_visitor)(const char *directory, int version, void *context);

/* Visit the groups with this controller that `membership` (the text of /proc/self/cgroup) names,
 * and all above them: a limit holds for all groups below, and a container may see only the last.
 * `mount` is /sys/fs/cgroup. */
void bn_cgroup_visit(const char *membership, const char *mount, const char *controller,
                     bn_cgroup_visitor visit, void *context);

#endif
