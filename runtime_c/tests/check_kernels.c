/* SPDX-License-Identifier: MIT
 *
 * check_kernels.c: every kernel of every tier this machine runs, held to its scalar twin bit for
 * bit, and timed on request.
 *
 *     check_kernels [--seed N] [--cases N] [--isa NAME] [--bench]
 */
#define _DEFAULT_SOURCE /* mmap, clock_gettime */

#include "bitnet_runtime.h"

#include "kernels_bench.h"
#include "kernels_float.h"
#include "kernels_int.h"
#include "kernels_lines.h"

#include <signal.h>
#include <time.h>

static const struct {
    const char *name;
    void (*run)(test *t);
} checks[] = {{"ternary_matmul", check_ternary},
              {"sketch_matmul", check_sketch},
              {"ternary_lookup", check_lookup},
              {"trit_matmul", check_trit},
              {"ternary_grouped", check_grouped},
              {"int8_rows", check_int8_rows},
              {"ternary_rows", check_row_lines},
              {"ternary_columns", check_column_lines},
              {"f32_matmul", check_f32_matmul},
              {"f16_matmul", check_f16_matmul},
              {"quantize", check_quantize},
              {"rms_norm", check_rms_norm},
              {"max", check_max},
              {"exp_sum", check_exp_sum},
              {"silu_gate", check_silu_gate},
              {"relu2_gate", check_relu2_gate},
              {"gelu_gate", check_gelu_gate},
              {"relu_gate", check_relu_gate},
              {"qk_f16", check_qk_f16},
              {"qk_f32", check_qk_f32},
              {"pv_f16", check_pv_f16},
              {"pv_f32", check_pv_f32},
              {"qk_int8", check_qk_int8},
              {"pv_int8", check_pv_int8},
              {"f32_to_f16", check_f32_to_f16},
              {"f16_to_f32", check_f16_to_f32},
              {"crc32", check_crc32},
              {"int8_peak", check_peak}};

enum { N_CHECKS = sizeof checks / sizeof checks[0] };

static char running[80]; /* for the signal handler */

static void on_fault(int signal_number) {
    const char *fault = signal_number == SIGILL ? "illegal instruction" : "access outside a buffer";
    const char *part[] = {fault, " in ", running, "\n"};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (write(STDERR_FILENO, part[i], strlen(part[i])) < 0)
            break;
    _exit(1);
}

static void check_tier(const bn_kernels *tier, const bn_kernels *scalar, uint64_t seed,
                       uint64_t cases) {
    /* A new entry in the table must come with a check; isa and lookup_tokens need none. */
    CHECK_EQ(sizeof(bn_kernels), (N_CHECKS + 2) * sizeof(void *));
    for (size_t i = 0; i < N_CHECKS; i++) {
        test t = {.tier = tier, .scalar = scalar, .random = seed + i, .seed = seed};
        snprintf(running, sizeof running, "%s of %s (--seed %" PRIu64 ")", checks[i].name,
                 tier->isa, seed);
        for (uint64_t n = 0; n < cases; n++)
            checks[i].run(&t);
    }
    printf("%-10s %d kernels x %" PRIu64 " cases equal the scalar ones\n", tier->isa, N_CHECKS,
           cases);
}

int main(int argc, char **argv) {
    uint64_t seed = (uint64_t)time(NULL), cases = 150;
    const char *isa = NULL;
    int timed = 0, found = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bench") == 0) {
            timed = 1;
        } else if (i + 1 < argc && strcmp(argv[i], "--seed") == 0) {
            seed = strtoull(argv[++i], NULL, 10);
        } else if (i + 1 < argc && strcmp(argv[i], "--cases") == 0) {
            cases = strtoull(argv[++i], NULL, 10);
        } else if (i + 1 < argc && strcmp(argv[i], "--isa") == 0) {
            isa = argv[++i];
        } else {
            fprintf(stderr, "usage: %s [--seed N] [--cases N] [--isa NAME] [--bench]\n", argv[0]);
            return 2;
        }
    }
    printf("--seed %" PRIu64 "\n", seed);
    signal(SIGSEGV, on_fault);
    signal(SIGBUS, on_fault);
    signal(SIGILL, on_fault);

    bn_kernels scalar, tier;
    bn_kernels_scalar(&scalar);
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++) {
        if (isa != NULL && strcmp(isa, bn_isa_name(i)) != 0)
            continue;
        CHECK(bn_kernels_select(&tier, bn_isa_name(i)));
        check_tier(&tier, &scalar, seed, cases);
        if (timed)
            bench_tier(&tier, &scalar);
        found = 1;
    }
    CHECK_MSG(found, "no tier named %s runs here", isa);
    return 0;
}
