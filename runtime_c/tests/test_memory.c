/* SPDX-License-Identifier: MIT
 *
 * test_memory.c: what cannot fit is refused before any work: with the limits of a simulated
 * machine, and with limits that this process sets itself.
 */
#define _XOPEN_SOURCE 700 /* mkdtemp, setrlimit */

#include "fake_root.h"
#include "session/session.h"
#include "system/memory.h"
#include "tiny_file.h"
#include "workspace.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- a simulated machine --- */

static char root[] = "/tmp/bitnet_memory_XXXXXX";

static const struct {
    const char *name, *text; /* NULL: a directory; each comes after its parent */
} machine[] = {
    {"proc", NULL},
    {"proc/self", NULL},
    {"proc/self/cgroup", ""},
    {"proc/meminfo", "MemTotal:       8000000 kB\nMemFree:         100000 kB\n"
                     "MemAvailable:    5000000 kB\nSwapTotal:       2000000 kB\n"
                     "SwapFree:        1000000 kB\n"},
    {"sys", NULL},
    {"sys/fs", NULL},
    {"sys/fs/cgroup", NULL},
    {"sys/fs/cgroup/memory.max", "max\n"},
    {"sys/fs/cgroup/free", NULL}, /* version 2 */
    {"sys/fs/cgroup/free/memory.max", "max\n"},
    {"sys/fs/cgroup/free/memory.current", "1000000000\n"},
    {"sys/fs/cgroup/box", NULL},
    {"sys/fs/cgroup/box/memory.max", "1000000000\n"},
    {"sys/fs/cgroup/box/memory.current", "700000000\n"},
    {"sys/fs/cgroup/box/memory.stat", "anon 600000000\nfile 100000000\ninactive_anon 7\n"
                                      "active_anon 600000000\ninactive_file 30000000\n"
                                      "active_file 60000000\nunevictable 0\n"},
    {"sys/fs/cgroup/box/inner", NULL},
    {"sys/fs/cgroup/box/inner/memory.max", "400000000\n"},
    {"sys/fs/cgroup/box/inner/memory.current", "100000000\n"},
    {"sys/fs/cgroup/slab", NULL}, /* a gigabyte of directory entries and inodes */
    {"sys/fs/cgroup/slab/memory.max", "2000000000\n"},
    {"sys/fs/cgroup/slab/memory.current", "1900000000\n"},
    {"sys/fs/cgroup/slab/memory.stat", "anon 500000000\nkernel 1100000000\nslab 1050000000\n"
                                       "inactive_file 200000000\nactive_file 100000000\n"
                                       "slab_reclaimable 1000000000\n"
                                       "slab_unreclaimable 50000000\n"},
    {"sys/fs/cgroup/full", NULL},
    {"sys/fs/cgroup/full/memory.max", "4096\n"},
    {"sys/fs/cgroup/full/memory.current", "8192\n"},
    {"sys/fs/cgroup/bad", NULL},
    {"sys/fs/cgroup/bad/memory.max", "plenty\n"},
    {"sys/fs/cgroup/memory", NULL}, /* version 1 */
    {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
    {"sys/fs/cgroup/memory/old", NULL},
    {"sys/fs/cgroup/memory/old/memory.limit_in_bytes", "2000000000\n"},
    {"sys/fs/cgroup/memory/old/memory.usage_in_bytes", "1500000000\n"},
    {"sys/fs/cgroup/memory/old/memory.stat", "cache 1\nactive_file 5\ninactive_file 5\n"
                                             "total_inactive_file 200000000\n"
                                             "total_active_file 100000000\n"},
};
enum { FILES = sizeof machine / sizeof *machine };

static void test_limits_of_a_machine(void) {
    static const struct {
        const char *membership;
        uint64_t own, map;
        const char *limit;
    } cases[] = {
        {"", 6000000ull * 1024, 8000000ull * 1024, "machine"},
        {"0::/\n", 6000000ull * 1024, 8000000ull * 1024, "machine"},
        {"0::/free\n", 6000000ull * 1024, 8000000ull * 1024, "machine"},
        {"0::/bad\n", 6000000ull * 1024, 8000000ull * 1024, "machine"},
        {"0::/none/such\n", 6000000ull * 1024, 8000000ull * 1024, "machine"},
        {"0::/box\n", 390000000, 1000000000, "group"}, /* file pages can be reclaimed */
        {"0::/box/inner\n", 300000000, 400000000, "group"},
        {"0::/box/gone/deeper\n", 390000000, 1000000000, "group"},
        {"0::/slab\n", 1400000000, 2000000000, "group"},
        {"0::/full\n", 0, 4096, "group"},
        {"5:memory:/old\n", 800000000, 2000000000, "group"},
        {"5:memory:/\n", 6000000ull * 1024, 8000000ull * 1024, "machine"},
        {"5:cpu:/old\n", 6000000ull * 1024, 8000000ull * 1024, "machine"},
        {"5:memory,hugetlb:/old\n0::/box\n", 390000000, 1000000000, "group"}, /* both at once */
    };
    CHECK(mkdtemp(root) != NULL);
    for (int i = 0; i < FILES; i++)
        put_file(root, machine[i].name, machine[i].text);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_file(root, "proc/self/cgroup", cases[i].membership);
        const bn_memory own = bn_memory_left(root, BN_MEMORY_OWN, UINT64_MAX);
        const bn_memory map = bn_memory_left(root, BN_MEMORY_MAP, UINT64_MAX);
        CHECK_MSG(own.bytes == cases[i].own, "%zu: %" PRIu64, i, own.bytes);
        CHECK_MSG(map.bytes == cases[i].map, "%zu: %" PRIu64, i, map.bytes);
        CHECK_MSG(strstr(own.limit, cases[i].limit), "%zu: %s", i, own.limit);
        CHECK_MSG(strstr(map.limit, cases[i].limit), "%zu: %s", i, map.limit);
        for (uint64_t enough = 1; enough < (uint64_t)1 << 40;
             enough *= 3) { /* never an overestimate */
            const uint64_t found = bn_memory_left(root, BN_MEMORY_OWN, enough).bytes;
            CHECK(found == own.bytes || (found >= enough && own.bytes >= enough));
        }
    }
    put_file(root, "sys/fs/cgroup/memory.max",
             "300000000\n"); /* a container sees its own group as the root */
    put_file(root, "proc/self/cgroup", "0::/\n");
    CHECK_EQ(bn_memory_left(root, BN_MEMORY_OWN, UINT64_MAX).bytes, 300000000);
    put_file(root, "sys/fs/cgroup/memory.max", "max\n");
    put_file(root, "proc/meminfo", "MemTotal: 1000 kB\n"); /* as in kernels before 3.14 */
    put_file(root, "proc/self/cgroup", "");
    CHECK_EQ(bn_memory_left(root, BN_MEMORY_OWN, UINT64_MAX).bytes, 1024000);
    for (int i = FILES - 1; i >= 0; i--) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", root, machine[i].name);
        CHECK_EQ(remove(path), 0);
    }
    CHECK_EQ(rmdir(root), 0);
    const bn_memory blind = bn_memory_left(root, BN_MEMORY_OWN, UINT64_MAX); /* nothing to read */
    CHECK(blind.bytes > 0 && strstr(blind.limit, "machine") != NULL);
}

/* --- this process --- */

enum { MEGABYTE = 1 << 20, CONTEXT = 1 << 22 };

/* Limit this process to `more` bytes of additional address space or data; 0: reset the limit. */
static void set_limit(int resource, uint64_t more) {
    static struct rlimit before;
    struct rlimit limit;
    CHECK_EQ(getrlimit(resource, &limit), 0);
    if (more) {
        unsigned long long size, data;
        FILE *file = fopen("/proc/self/statm", "r");
        CHECK(file != NULL);
        CHECK_EQ(fscanf(file, "%llu %*u %*u %*u %*u %llu", &size, &data), 2);
        CHECK_EQ(fclose(file), 0);
        before = limit;
        const uint64_t pages = resource == RLIMIT_DATA ? data : size;
        limit.rlim_cur = pages * (uint64_t)sysconf(_SC_PAGESIZE) + more;
    } else {
        limit.rlim_cur = before.rlim_cur;
    }
    CHECK_EQ(setrlimit(resource, &limit), 0);
}

static bn_session_memory plan(const bn_model *model, bn_session_options options) {
    bn_session_memory memory;
    CHECK_EQ(bn_session_plan(model, &options, &memory), BN_OK);
    return memory;
}

/* The plan equals what the session and the workspace then take. */
static void test_plan(bn_model *model) {
    bn_session_memory memory;
    CHECK_EQ(bn_session_plan(NULL, NULL, &memory), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_plan(model, NULL, NULL), BN_ERR_ARGUMENT);
    const bn_session_options wrong = {.n_ctx = CONTEXT + 1};
    CHECK_EQ(bn_session_plan(model, &wrong, &memory), BN_ERR_ARGUMENT);
    for (int32_t kv_type = 0; kv_type < BN_KV_TYPES; kv_type++)
        for (int32_t n_ctx = 1; n_ctx < 100000; n_ctx = 7 * n_ctx + 3)
            for (int32_t batch = 0; batch <= 4096; batch += 1024) {
                const bn_session_options options = {
                    .n_ctx = n_ctx, .kv_type = kv_type, .batch = batch};
                bn_session *s;
                const uint64_t needed = plan(model, options).needed;
                CHECK_EQ(bn_session_new(model, &options, &s), BN_OK);
                CHECK_EQ(needed, bn_session_bytes(s) + model->work->size);
                CHECK_EQ(plan(model, options).needed,
                         bn_session_bytes(s)); /* for another session */
                bn_session_free(s);
            }
}

/* A session with the largest context that fits is created, one token more is refused. */
static void test_session_under(bn_model *model, int resource, uint64_t more, const char *name) {
    const bn_session_options whole = {.kv_type = BN_KV_F32};
    bn_session *s = NULL;
    set_limit(resource, more);
    const bn_session_memory memory = plan(model, whole);
    CHECK(strstr(memory.limited_by, name) != NULL);
    CHECK(memory.needed > 500 * (uint64_t)MEGABYTE);
    CHECK(memory.available <= more && memory.available > more - 14 * MEGABYTE);
    CHECK(memory.largest_n_ctx > 1000 && memory.largest_n_ctx < CONTEXT);
    CHECK_EQ(bn_session_new(model, &whole, &s), BN_ERR_MEMORY);
    bn_session_options fits = {.kv_type = BN_KV_F32, .n_ctx = memory.largest_n_ctx};
    CHECK(plan(model, fits).needed <= memory.available);
    if (!SANITIZED) { /* sanitizers map terabytes, and end the program when they get no more */
        CHECK_EQ(bn_session_new(model, &fits, &s), BN_OK);
        bn_session_free(s);
    }
    fits.n_ctx += 4096; /* more than a page beyond that */
    CHECK(plan(model, fits).needed > memory.available);
    CHECK_EQ(bn_session_new(model, &fits, &s), BN_ERR_MEMORY);
    set_limit(resource, 0);
}

static void test_session_of_a_machine(bn_model *model) {
    const bn_session_memory memory = plan(model, (bn_session_options){.batch = 4096});
    CHECK(memory.available > 0 && memory.available < UINT64_MAX);
    CHECK_EQ(memory.largest_n_ctx == CONTEXT, memory.needed <= memory.available);
}

/* `name`: expected in the error; NULL: no memory error is expected. */
static void test_file_under(const char *path, int resource, int no_mmap, const char *name) {
    const bn_load_options options = {.threads = 1, .no_mmap = no_mmap};
    char detail[BN_DETAIL_SIZE];
    bn_model *model;
    if (resource >= 0)
        set_limit(resource, 64 * MEGABYTE);
    const bn_status status = bn_model_open(path, &options, &model, detail);
    CHECK_EQ(status == BN_ERR_MEMORY, name != NULL);
    CHECK(status != BN_OK);
    CHECK_MSG(name == NULL || (strstr(detail, name) && strstr(detail, " MB, expected at most ")),
              "%s", detail);
    if (resource >= 0)
        set_limit(resource, 0);
}

static void test_files(void) {
    char path[] = "/tmp/bitnet_large_XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK_EQ(write(fd,
                   "\x89"
                   "BITNET\n",
                   8),
             8); /* and nothing else */
    CHECK_EQ(ftruncate(fd, 200 * MEGABYTE), 0);
    test_file_under(path, RLIMIT_AS, 0, "RLIMIT_AS");
    test_file_under(path, RLIMIT_AS, 1, "RLIMIT_AS");
    test_file_under(path, RLIMIT_DATA, 0, NULL); /* a mapping does not count as data */
    test_file_under(path, RLIMIT_DATA, 1, "RLIMIT_DATA");
    if (ftruncate(fd, (off_t)8 << 40) == 0) { /* if the file system allows it */
        test_file_under(path, -1, 0, "machine");
        test_file_under(path, -1, 1, "");
    }
    CHECK_EQ(close(fd), 0);
    CHECK_EQ(unlink(path), 0);
}

static void test_bandwidth(void) {
    double rate = -1;
    set_limit(RLIMIT_AS, 64 * MEGABYTE);
    CHECK_EQ(bn_measure_read_bandwidth(1, ((uint64_t)1 << 40) - 1, &rate), BN_ERR_MEMORY);
    set_limit(RLIMIT_AS, 0);
    CHECK(rate == -1);
}

int main(void) {
    size_t size;
    uint8_t *file = tiny_file(tiny_decoder, SIZE_MAX, SIZE_MAX, &size);
    const bn_load_options options = {.threads = 1};
    bn_model *model;
    tiny_put(file + tiny_section(file, 1) + 4 * 9, CONTEXT, 4); /* max_context */
    tiny_fix_checksums(file, size);
    test_limits_of_a_machine();
    CHECK_EQ(bn_model_open_bytes(file, size, &options, &model, NULL), BN_OK);
#if defined(__linux__)
    /* Must run before other tests have left malloc memory to reuse. For any remainder of the last
     * huge page: malloc takes two more to align it. */
    for (uint64_t more = 64 * MEGABYTE; more < 66 * MEGABYTE; more += MEGABYTE / 8) {
        test_session_under(model, RLIMIT_AS, more, "RLIMIT_AS");
        test_session_under(model, RLIMIT_DATA, more, "RLIMIT_DATA");
    }
    test_files();
    test_bandwidth();
#endif
    test_plan(model);
    test_session_of_a_machine(model);
    bn_model_close(model);
    free(file);
    return 0;
}
