/* SPDX-License-Identifier: MIT
 *
 * test_cpu.c: what the library reports about this build and this machine: tiers, processors,
 * limits, status texts.
 */
#define _GNU_SOURCE /* sched_setaffinity, mkdtemp */

#include "bitnet_runtime.h"
#include "fake_root.h"
#include "kernels/kernels.h"
#include "system/cores.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#endif
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

/* --- Tiers --- */

static int is_listed(const char *isa) {
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++)
        if (strcmp(bn_isa_name(i), isa) == 0)
            return 1;
    return 0;
}

/* No member of a kernel table is NULL or 0, except the limits of lookup, and weigh for types with
 * float weights. */
static void check_complete(const bn_kernels *table) {
    bn_kernels full = *table;
    uintptr_t members[sizeof full / sizeof(void *)];
    full.products.lookup_tokens = full.products.lookup_rows = full.products.lookup_cols = 1;
    for (int32_t type = 0; type < BN_KV_TYPES; type++)
        if (!full.attention[type].weigh)
            full.attention[type].weigh = table->attention[BN_KV_INT8].weigh;
    memcpy(members, &full, sizeof members);
    for (size_t i = 0; i < sizeof members / sizeof members[0]; i++)
        CHECK_MSG(members[i] != 0, "tier %s, member %zu", table->isa, i);
}

static void test_tiers(void) {
    bn_kernels table;
    int32_t n = 0;
    while (bn_isa_name(n) != NULL) {
        CHECK(bn_kernels_select(&table, bn_isa_name(n)));
        CHECK(strcmp(table.isa, bn_isa_name(n)) == 0);
        check_complete(&table);
        CHECK(table.bytes.crc32(0, (const uint8_t *)"123456789", 9) ==
              0xcbf43926); /* it can be called */
        n++;
    }
    CHECK(n >= 1 && strcmp(bn_isa_name(n - 1), "scalar") == 0);
    CHECK(bn_isa_name(-1) == NULL && bn_isa_name(n) == NULL && bn_isa_name(INT32_MAX) == NULL);
    CHECK(bn_kernels_select(&table, NULL));
    CHECK(strcmp(table.isa, bn_isa_name(0)) == 0);

    const char *unknown[] = {"", "AVX2", "avx", "scalar ", "sse9"};
    bn_kernels before = table;
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        CHECK(!bn_kernels_select(&table, unknown[i]));
        CHECK(memcmp(&before, &table, sizeof table) == 0);
    }
}

#if defined(__x86_64__) && defined(__linux__)
/* Ask the kernel, as it does not depend on our own detection. */
static int tiles_are_granted(void) {
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[8192];
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file))
        found = strncmp(line, "flags", 5) == 0 && strstr(line, " amx_int8") != NULL;
    if (file)
        fclose(file);
    return found && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

/* A tier is listed exactly if the compiler's own detection finds its instructions and the build has
 * the file. */
static void test_detection(void) {
    bn_kernels scrap;
    bn_kernels_scalar(&scrap);
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                     __builtin_cpu_supports("pclmul");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    CHECK_EQ(is_listed("avx2"), avx2 && bn_kernels_avx2(&scrap));
    CHECK_EQ(is_listed("avx512vnni"), avx512 && bn_kernels_avx512vnni(&scrap));
    CHECK(avx2 || !is_listed("avxvnni"));
#if defined(__linux__) && !defined(BITNET_AMX_IN_C)
    CHECK_EQ(is_listed("amx"), avx512 && tiles_are_granted() && bn_kernels_amx(&scrap));
#else
    CHECK(avx512 || !is_listed("amx"));
#endif
#elif defined(__aarch64__)
    CHECK_EQ(is_listed("neon"), bn_kernels_neon(&scrap));
    CHECK(!is_listed("avx2"));
#else
    CHECK(strcmp(bn_isa_name(0), "scalar") == 0);
#endif
}

/* Linux refuses AMX to a process with a small signal stack: then this tier is absent, and the
 * others are not. Must run first, as children inherit a granted permission. */
static void test_small_signal_stack(void) {
#if defined(__linux__) && !defined(BITNET_AMX_IN_C)
    const pid_t child = fork();
    if (child == 0) {
        static char room[4096];
        const stack_t stack = {.ss_sp = room, .ss_size = sizeof room};
        bn_kernels table;
        if (sigaltstack(&stack, NULL) != 0) /* on some kernels, AVX-512 alone needs a larger
                                             * stack */
            _exit(0);
        _exit(is_listed("amx") || !is_listed("scalar") || !bn_kernels_select(&table, NULL) ||
              strcmp(table.isa, "amx") == 0);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
#endif
}

/* --- Processors --- */

static void test_processors(void) {
    CHECK(bn_usable_cpus() >= 1 && bn_usable_cpus() <= 256);
    CHECK(bn_default_threads() >= 1 && bn_default_threads() <= bn_usable_cpus());
#if defined(__linux__)
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0)
        return;
    size_t cpu = 0;
    while (!CPU_ISSET(cpu, &all))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    CHECK_EQ(bn_usable_cpus(), 1);
    CHECK_EQ(bn_default_threads(), 1);
    CHECK_EQ(sched_setaffinity(0, sizeof all, &all), 0);
#endif
}

static char mount[] = "/tmp/bitnet_cgroup_XXXXXX";

static void test_cgroup_quota(void) {
    static const struct {
        const char *name, *text; /* NULL: a directory; each comes after its parent */
    } tree[] = {{"user", NULL},
                {"user/cpu.max", "150000 100000\n"},
                {"user/app", NULL},
                {"user/app/cpu.max", "400000 100000\n"},
                {"free", NULL},
                {"free/cpu.max", "max 100000\n"},
                {"bad", NULL},
                {"bad/cpu.max", "many\n"},
                {"cpu", NULL},
                {"cpu/box", NULL},
                {"cpu/box/cpu.cfs_quota_us", "300000\n"},
                {"cpu/box/cpu.cfs_period_us", "100000\n"},
                {"cpu/open", NULL},
                {"cpu/open/cpu.cfs_quota_us", "-1\n"},
                {"cpu/open/cpu.cfs_period_us", "100000\n"}};
    static const struct {
        const char *membership;
        double quota;
    } cases[] = {
        {"0::/user\n", 1.5},
        {"0::/user/app\n", 1.5},           /* the parent's limit is lower */
        {"0::/user/app/none/such\n", 1.5}, /* not visible from here: the nearest visible ancestor
                                            * counts */
        {"0::/user/app", 1.5},             /* no end of line */
        {"0::/free\n", 0},
        {"0::/bad\n", 0},
        {"0::/\n", 0},
        {"", 0},
        {"nonsense\n:\n::\n\n", 0},
        {"4:cpu,cpuacct:/box\n", 3},
        {"4:cpuacct,cpu:/box\n", 3},
        {"4:cpuacct,cpuset:/box\n", 0}, /* other controllers have separate groups */
        {"4:cpu:/open\n", 0},
        {"9:memory:/m\n4:cpu:/box\n0::/user\n", 1.5}, /* both versions at once */
    };
    enum { N = sizeof tree / sizeof tree[0] };
    CHECK(mkdtemp(mount) != NULL);
    for (int i = 0; i < N; i++)
        put_file(mount, tree[i].name, tree[i].text);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const double found = bn_cgroup_quota(cases[i].membership, mount);
        CHECK_MSG(found == cases[i].quota, "case %zu: %g, expected %g", i, found, cases[i].quota);
    }
    for (int length = 900; length < 1100; length++) { /* up to paths that are too long, ignored */
        char longest[1200];
        snprintf(longest, sizeof longest, "0::/free/%0*d\n", length, 0);
        CHECK(bn_cgroup_quota(longest, mount) == 0);
    }
    for (int i = N - 1; i >= 0; i--) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", mount, tree[i].name);
        CHECK_EQ(remove(path), 0);
    }
    CHECK_EQ(rmdir(mount), 0);
}

/* --- Limits --- */

static void test_limits(void) {
    const uint64_t bytes = 64u << 20;
    double rate = -1;
    CHECK_EQ(bn_measure_read_bandwidth(0, bytes, &rate), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_measure_read_bandwidth(257, bytes, &rate), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_measure_read_bandwidth(1, 0, &rate), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_measure_read_bandwidth(1, bytes, NULL), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_measure_int8_peak("no such tier", 1, &rate), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_measure_int8_peak(NULL, 0, &rate), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_measure_int8_peak(NULL, 1, NULL), BN_ERR_ARGUMENT);
    CHECK(rate == -1);

    for (int32_t threads = 1; threads <= 2; threads++) {
        CHECK_EQ(bn_measure_read_bandwidth(threads, bytes, &rate), BN_OK);
        CHECK_MSG(rate > 0.1 && rate < 10000, "%g GB/s", rate);
    }
    CHECK_EQ(bn_measure_int8_peak("scalar", 2, &rate), BN_OK);
    CHECK_MSG(rate > 0.01 && rate < 10000, "scalar: %g GMAC/s", rate);
    CHECK_EQ(bn_measure_int8_peak(NULL, 1, &rate), BN_OK);
    CHECK_MSG(rate > 0.01 && rate < 10000, "best: %g GMAC/s", rate);
}

/* --- Status texts --- */

static void test_text(void) {
    enum { LAST = BN_ERR_MODEL };
    const char *unknown = bn_status_text((bn_status)(LAST + 1));
    CHECK(unknown != NULL && bn_status_text((bn_status)-1) == unknown);
    for (int i = 0; i <= LAST; i++) {
        const char *text = bn_status_text((bn_status)i);
        CHECK_MSG(text != NULL && text[0] != '\0' && text != unknown, "status %d", i);
        for (int j = 0; j < i; j++)
            CHECK_MSG(strcmp(text, bn_status_text((bn_status)j)) != 0, "%d and %d", i, j);
    }
    int major, minor, patch, end = 0;
    CHECK_EQ(sscanf(bn_version(), "%d.%d.%d%n", &major, &minor, &patch, &end), 3);
    CHECK(bn_version()[end] == '\0');
}

int main(void) {
    test_small_signal_stack();
    test_tiers();
    test_detection();
    test_processors();
    test_cgroup_quota();
    test_limits();
    test_text();
    return 0;
}
