/* SPDX-License-Identifier: MIT
 *
 * cpu.c: detects the instruction sets that the CPU and operating system support and selects the
 * kernel table. A tier has a name, a CPU test and a filler (kernels.h); each architecture lists its
 * tiers lowest first, and each tier overrides the ones below it.
 */
#define _DEFAULT_SOURCE /* syscall */

#include "bitnet_runtime.h"
#include "kernels.h"

#include <string.h>

typedef struct tier {
    const char *name;
    int (*runs)(void);
    int (*fill)(bn_kernels *table); /* 0: not in this build */
} tier;

int bn_like_intel;

static int always(void) {
    return 1;
}

static int fill_scalar(bn_kernels *table) {
    bn_kernels_scalar(table);
    return 1;
}

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { EAX, EBX, ECX, EDX };

/* Register `reg` of a CPUID leaf; 0 if the CPU has no such leaf. */
static uint32_t cpuid(uint32_t leaf, uint32_t subleaf, int reg) {
    uint32_t r[4] = {0};
    if (!__get_cpuid_count(leaf, subleaf, &r[EAX], &r[EBX], &r[ECX], &r[EDX]))
        return 0;
    return r[reg];
}

/* Does the operating system save these register states (bits of XCR0) for each thread? */
static int os_saves(uint32_t states) {
    if (!(cpuid(1, 0, ECX) & bit_OSXSAVE))
        return 0;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & states) == states;
}

static int has(uint32_t found, uint32_t wanted) {
    return (found & wanted) == wanted;
}

static int runs_avx2(void) {
    const uint32_t xmm_ymm = 0x06;
    return has(cpuid(1, 0, ECX), bit_AVX | bit_FMA | bit_F16C | bit_PCLMUL) &&
           has(cpuid(7, 0, EBX), bit_AVX2) && os_saves(xmm_ymm);
}

static int runs_avx512vnni(void) {
    const uint32_t xmm_ymm_zmm_masks = 0xe6;
    return runs_avx2() &&
           has(cpuid(7, 0, EBX), bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) &&
           has(cpuid(7, 0, ECX), bit_AVX512VNNI) && os_saves(xmm_ymm_zmm_masks);
}

/* Linux enables AMX tile state only for a process that requests it, once for all its threads, and
 * refuses if a thread's alternate signal stack is too small. */
static int runs_amx(void) {
#if defined(BITNET_AMX_IN_C)
    return runs_avx512vnni();
#elif defined(__linux__)
    bn_kernels scrap;                      /* a build without AMX kernels does not request it */
    enum { ASK = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    const uint32_t tile = 1u << 24, int8 = 1u << 25, states = 3u << 17;
    return runs_avx512vnni() && has(cpuid(7, 0, EDX), tile | int8) && os_saves(states) &&
           bn_kernels_amx(&scrap) && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    return 0;
#endif
}

static int runs_avxvnni(void) {
#ifdef BITNET_AVXVNNI_AS_EVEX
    return runs_avx512vnni();
#else
    const uint32_t avx_vnni = 1u << 4; /* older compilers' headers do not name it */
    return runs_avx2() && has(cpuid(7, 1, EAX), avx_vnni);
#endif
}

__attribute__((constructor)) static void look(void) {
    bn_like_intel = cpuid(0, 0, EBX) == 0x756e6547; /* Genu */
}

/* AMD's CPU family; 0 for other vendors. Of the CPUs with AVX-512, family 19h is Zen 4, which takes
 * two cycles for a 512-bit multiplication. Zen 5 (1Ah) and Intel's cores take one; on Emerald
 * Rapids lookup tables reach 0.65 of the peak, direct products 0.97. */
static uint32_t amd_family(void) {
    const uint32_t version = cpuid(1, 0, EAX), amd = 0x68747541; /* Auth */
    return cpuid(0, 0, EBX) == amd ? (version >> 8 & 15) + (version >> 20 & 255) : 0;
}

static int fill_avx512vnni(bn_kernels *table) {
    if (!bn_kernels_avx512vnni(table))
        return 0;
    const uint32_t family = amd_family();
    if (family == 0x1a) /* measured: see lookup_template.h */
        table->products.lookup_rows = 1280, table->products.lookup_cols = 2048;
    else if (family != 0x19)
        table->products.lookup_rows = SIZE_MAX;
    return 1;
}

static const tier tiers[] = {{"scalar", always, fill_scalar},
                             {"avx2", runs_avx2, bn_kernels_avx2},
                             {"avxvnni", runs_avxvnni, bn_kernels_avxvnni},
                             {"avx512vnni", runs_avx512vnni, fill_avx512vnni},
                             {"amx", runs_amx, bn_kernels_amx}};

#elif defined(__aarch64__)

/* CRC32 is optional in Armv8.0, but only the very first CPUs lack it. */
#if defined(__linux__)
#include <sys/auxv.h>
enum { CRC32 = 1 << 7, ASIMDDP = 1 << 20, I8MM = 1 << 13 }; /* HWCAP_*, HWCAP2_* */
static int runs_neon(void) {
    return (getauxval(AT_HWCAP) & CRC32) != 0;
}
static int runs_dotprod(void) {
    return runs_neon() && (getauxval(AT_HWCAP) & ASIMDDP) != 0;
}
static int runs_i8mm(void) {
    return runs_dotprod() && (getauxval(AT_HWCAP2) & I8MM) != 0;
}
#elif defined(__APPLE__)
#include <sys/sysctl.h>
static int feature(const char *name) {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(name, &found, &size, NULL, 0) == 0 && found;
}
static int runs_neon(void) {
    return 1;
}
static int runs_dotprod(void) {
    return feature("hw.optional.arm.FEAT_DotProd");
}
static int runs_i8mm(void) {
    return runs_dotprod() && feature("hw.optional.arm.FEAT_I8MM");
}
#else
static int runs_neon(void) {
    return 1;
}
static int runs_dotprod(void) {
    return 0;
}
static int runs_i8mm(void) {
    return 0;
}
#endif

static const tier tiers[] = {{"scalar", always, fill_scalar},
                             {"neon", runs_neon, bn_kernels_neon},
                             {"dotprod", runs_dotprod, bn_kernels_dotprod},
                             {"i8mm", runs_i8mm, bn_kernels_i8mm}};

#else

static const tier tiers[] = {{"scalar", always, fill_scalar}};

#endif

enum { N_TIERS = sizeof tiers / sizeof tiers[0] };

int bn_kernels_select(bn_kernels *table, const char *isa) {
    bn_kernels built;
    for (int i = 0; i < N_TIERS; i++) {
        if (!tiers[i].runs() || !tiers[i].fill(&built))
            continue;
        built.isa = tiers[i].name;
        if (isa != NULL && strcmp(isa, tiers[i].name) == 0)
            break;
    }
    if (isa != NULL && strcmp(isa, built.isa) != 0)
        return 0;
    *table = built;
    return 1;
}

const char *bn_isa_name(int32_t i) {
    bn_kernels built;
    const char *names[N_TIERS];
    int32_t n = 0;
    for (int t = 0; t < N_TIERS; t++)
        if (tiers[t].runs() && tiers[t].fill(&built))
            names[n++] = tiers[t].name;
    return i >= 0 && i < n ? names[n - 1 - i] : NULL;
}
