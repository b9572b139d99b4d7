/* SPDX-License-Identifier: MIT
 *
 * cores.c: the processors of the machine that this process may use, limited by affinity (taskset,
 * cpusets) and by the CPU quota of its cgroups (containers).
 */
#define _GNU_SOURCE /* sched_getaffinity */

#include "cores.h"
#include "bitnet_runtime.h"
#include "cgroup.h"
#include "floats.h"
#include "threads.h"

#include <stdio.h>
#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

enum { PATH_SIZE = 1024 };

static int32_t clamp_cpus(long n) {
    return n < 1 ? 1 : n > BN_MOST_THREADS ? BN_MOST_THREADS : (int32_t)n;
}

/* --- cgroup quota --- */

/* Quota of the group at `directory`, in processors; 0 if it sets none. */
static double quota_at(const char *directory, int version) {
    char path[PATH_SIZE + 32], text[64];
    double quota = 0, period = 0;
    if (version == 2) { /* "max 100000", "200000 100000" */
        snprintf(path, sizeof path, "%s/cpu.max", directory);
        if (!bn_read_text(path, text, sizeof text) || sscanf(text, "%lf %lf", &quota, &period) != 2)
            return 0;
    } else { /* two files, -1 for no quota */
        snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", directory);
        if (!bn_read_text(path, text, sizeof text) || sscanf(text, "%lf", &quota) != 1)
            return 0;
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", directory);
        if (!bn_read_text(path, text, sizeof text) || sscanf(text, "%lf", &period) != 1)
            return 0;
    }
    return quota > 0 && period > 0 ? quota / period : 0;
}

static double least(double a, double b) {
    return a == 0 || (b != 0 && b < a) ? b : a;
}

static void least_quota(const char *directory, int version, void *context) {
    double *quota = context;
    *quota = least(*quota, quota_at(directory, version));
}

double bn_cgroup_quota(const char *membership, const char *mount) {
    double quota = 0;
    bn_cgroup_visit(membership, mount, "cpu", least_quota, &quota);
    return quota;
}

/* --- processors and cores --- */

#if defined(__linux__)

/* The CPUs this process may run on; returns 0 if the kernel has more CPUs than the set holds. */
static int allowed_cpus(cpu_set_t *set) {
    CPU_ZERO(set);
    return sched_getaffinity(0, sizeof *set, set) == 0;
}

int32_t bn_usable_cpus(void) {
    cpu_set_t set;
    char membership[8192];
    long n = allowed_cpus(&set) ? CPU_COUNT(&set) : sysconf(_SC_NPROCESSORS_ONLN);
    if (bn_read_text("/proc/self/cgroup", membership, sizeof membership)) {
        const double quota = bn_cgroup_quota(membership, "/sys/fs/cgroup");
        if (quota > 0 && quota < (double)n)
            n = (long)quota;
    }
    return clamp_cpus(n);
}

/* The first hardware thread of a CPU's core, which identifies the core; the CPU itself if
 * unknown. */
static size_t core_of(size_t cpu) {
    char path[96], text[64];
    size_t first;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%zu/topology/thread_siblings_list",
             cpu);
    if (!bn_read_text(path, text, sizeof text) || sscanf(text, "%zu", &first) != 1)
        return cpu;
    return first < CPU_SETSIZE ? first : cpu;
}

/* Number of cores among the allowed CPUs: using both hardware threads of a core gains nothing. */
static int32_t physical_cores(void) {
    cpu_set_t allowed, cores;
    if (!allowed_cpus(&allowed))
        return BN_MOST_THREADS;
    CPU_ZERO(&cores);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed))
            CPU_SET(core_of(cpu), &cores);
    return clamp_cpus(CPU_COUNT(&cores));
}

#else

int32_t bn_usable_cpus(void) {
    return clamp_cpus(sysconf(_SC_NPROCESSORS_ONLN));
}

static int32_t physical_cores(void) {
    int n = BN_MOST_THREADS;
#if defined(__APPLE__)
    /* Only performance cores if there are two kinds: a slow core would hold up every run. */
    size_t size = sizeof n;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &n, &size, NULL, 0) != 0)
        sysctlbyname("hw.physicalcpu", &n, &size, NULL, 0);
#endif
    return clamp_cpus(n);
}

#endif

int32_t bn_default_threads(void) {
    BN_STANDARD_FLOATS; /* for the quota */
    const int32_t cores = physical_cores(), usable = bn_usable_cpus();
    return cores < usable ? cores : usable;
}
