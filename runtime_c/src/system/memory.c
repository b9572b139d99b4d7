/* SPDX-License-Identifier: MIT
 *
 * memory.c: see memory.h. A limit that cannot be read counts as none.
 */
#define _XOPEN_SOURCE 700 /* getrlimit, sysconf */

#include "memory.h"
#include "cgroup.h"
#include "pages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PATH_SIZE = 1100, STAT_SIZE = 1 << 14 };

/* "max" in version 1 of cgroups is a number: 2^63 rounded down to pages. */
static const uint64_t NO_LIMIT = (uint64_t)1 << 62;

typedef struct search {
    const char *root;
    bn_memory_use use;
    uint64_t enough;
    bn_memory least;
} search;

static void apply(search *s, uint64_t limit, uint64_t used, const char *name) {
    const uint64_t left = limit > used ? limit - used : 0;
    if (left < s->least.bytes)
        s->least = (bn_memory){left, name};
}

static int read_at(const char *directory, const char *name, char *text, size_t size) {
    char path[PATH_SIZE];
    const int length = snprintf(path, sizeof path, "%s/%s", directory, name);
    return length > 0 && length < PATH_SIZE && bn_read_text(path, text, size);
}

/* The number after `name` at the beginning of a line; 0 if there is none. */
static uint64_t field(const char *text, const char *name) {
    const size_t n = strlen(name);
    while (text && strncmp(text, name, n) != 0) {
        text = strchr(text, '\n');
        text = text ? text + 1 : NULL;
    }
    return text ? strtoull(text + n, NULL, 10) : 0;
}

/* --- limits of the process --- */

/* `column` of /proc/self/statm is the amount in use, in pages. */
static void apply_rlimit(search *s, int resource, int column, const char *name) {
    struct rlimit limit;
    char text[256], *at = text;
    uint64_t pages = 0;
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        !read_at(s->root, "proc/self/statm", text, sizeof text))
        return;
    for (int i = 0; i <= column; i++)
        pages = strtoull(at, &at, 10);
    /* plus what malloc adds to align large blocks */
    const uint64_t used = pages * (uint64_t)sysconf(_SC_PAGESIZE) + 2 * BN_HUGE_PAGE;
    apply(s, (uint64_t)limit.rlim_cur, used, name);
}

static void apply_rlimits(search *s) {
#if defined(RLIMIT_AS)
    apply_rlimit(s, RLIMIT_AS, 0, "the limit on address space (RLIMIT_AS, ulimit -v)");
#endif
    if (s->use == BN_MEMORY_OWN) /* mapping a file read-only does not count as data */
        apply_rlimit(s, RLIMIT_DATA, 5, "the limit on data (RLIMIT_DATA, ulimit -d)");
}

/* --- limits of its control groups --- */

static void apply_group(const char *directory, int version, void *context) {
    /* Indexed by version. Of the memory in use, page cache can be reclaimed, and so can slab, which
     * version 1 does not report. */
    static const char *const limits[] = {"memory.limit_in_bytes", "memory.max"};
    static const char *const uses[] = {"memory.usage_in_bytes", "memory.current"};
    static const char *const given_back[][3] = {
        {"total_active_file ", "total_inactive_file "},
        {"active_file ", "inactive_file ", "slab_reclaimable "}};
    search *s = context;
    const int v = version == 2;
    char text[STAT_SIZE], *end;
    if (!read_at(directory, limits[v], text, sizeof text))
        return;
    const uint64_t limit = strtoull(text, &end, 10);
    if (end == text || limit >= NO_LIMIT)
        return;
    uint64_t used = 0;
    if (s->use == BN_MEMORY_OWN && read_at(directory, uses[v], text, sizeof text))
        used = strtoull(text, NULL, 10);
    if ((limit < used || limit - used < s->enough) &&
        read_at(directory, "memory.stat", text, sizeof text)) {
        for (int i = 0; i < 3 && given_back[v][i] != NULL; i++) {
            const uint64_t back = field(text, given_back[v][i]);
            used -= back < used ? back : used;
        }
    }
    apply(s, limit, used, "the memory limit of the control group (container)");
}

static void apply_groups(search *s) {
    char membership[8192], mount[PATH_SIZE];
    if (!read_at(s->root, "proc/self/cgroup", membership, sizeof membership))
        return;
    snprintf(mount, sizeof mount, "%s/sys/fs/cgroup", s->root);
    bn_cgroup_visit(membership, mount, "memory", apply_group, s);
}

/* --- memory of the machine --- */

static void apply_machine(search *s) {
    static const char name[] = "the memory of this machine";
    char text[4096];
    if (!read_at(s->root, "proc/meminfo", text, sizeof text)) {
#if defined(_SC_PHYS_PAGES)
        const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
        if (pages > 0 && size > 0)
            apply(s, (uint64_t)pages * (uint64_t)size, 0, name);
#endif
        return;
    }
    const uint64_t total = field(text, "MemTotal:"), available = field(text, "MemAvailable:");
    const uint64_t kilobytes =
        s->use == BN_MEMORY_MAP || available == 0 ? total : available + field(text, "SwapFree:");
    if (kilobytes > 0)
        apply(s, kilobytes * 1024, 0, name);
}

bn_memory bn_memory_left(const char *root, bn_memory_use use, uint64_t enough) {
    search s = {root, use, enough, {UINT64_MAX, "nothing"}};
    apply_rlimits(&s);
    apply_groups(&s);
    apply_machine(&s);
    return s.least;
}
