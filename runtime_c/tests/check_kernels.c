/* SPDX-License-Identifier: MIT
 *
 * check_kernels.c: compares every kernel of every tier that this machine runs with its scalar
 * counterpart, bit for bit, and times it on request.
 *
 *     check_kernels [--seed N] [--cases N] [--isa NAME] [--bench]
 */
#define _DEFAULT_SOURCE /* mmap, clock_gettime */

#include "bitnet_runtime.h"

#include "kernels/check_attention.h"
#include "kernels/check_bytes.h"
#include "kernels/check_choosing.h"
#include "kernels/check_lines.h"
#include "kernels/check_products.h"
#include "kernels/check_rows.h"
#include "kernels/check_training.h"
#include "kernels/check_vectors.h"

#include <signal.h>
#include <time.h>

/* In the order of each topic's table; attention has two kernels for each cache type. */
static const kernel_test product_tests[] = {
    {"ternary_matmul", check_ternary, time_ternary},
    {"ternary_scaled", check_scaled, NULL},
    {"sketch_matmul", check_sketch, NULL},
    {"ternary_lookup", check_lookup, time_lookup},
    {"trit_matmul", check_trit, time_trit},
    {"ternary_grouped", check_grouped, time_grouped},
    {"int8_rows", check_int8_rows, time_int8_rows},
    {"ternary_rows", check_row_lines, time_row_lines},
    {"ternary_columns", check_column_lines, time_column_lines},
    {"f32_matmul", check_f32_matmul, time_f32_matmul},
    {"f16_matmul", check_f16_matmul, time_f16_matmul},
    {"int8_add_rows", check_int8_add_rows, time_int8_add_rows},
    {"int8_peak", check_peak, NULL}};

static const kernel_test vector_tests[] = {
    {"scale_sums", check_scale_sums, time_scale_sums},
    {"add", check_add, time_add},
    {"quantize", check_quantize, time_quantize},
    {"rms_norm", check_rms_norm, time_rms_norm},
    {"layer_norm", check_layer_norm, time_layer_norm},
    {"max", check_max, time_max},
    {"reaching", check_reaching, time_reaching},
    {"estimate", check_estimate, time_estimate},
    {"may_reach", check_may_reach, time_may_reach},
    {"noise", check_noise, time_noise},
    {"exp_sum", check_exp_sum, time_exp_sum},
    {"relu2_gate", check_relu2_gate, time_relu2_gate},
    {"silu_gate", check_silu_gate, time_silu_gate},
    {"gelu_gate", check_gelu_gate, time_gelu_gate},
    {"relu_gate", check_relu_gate, time_relu_gate},
    {"gelu_erf_gate", check_gelu_erf_gate, time_gelu_erf_gate}};

static const kernel_test byte_tests[] = {{"f32_to_f16", check_f32_to_f16, time_f32_to_f16},
                                         {"f16_to_f32", check_f16_to_f32, time_f16_to_f32},
                                         {"crc32", check_crc32, time_crc32}};

static const kernel_test training_tests[] = {
    {"codes", check_train_codes, time_train_codes},
    {"between", check_train_between, time_train_between},
    {"magnitudes", check_train_magnitudes, time_train_magnitudes},
    {"ternary", check_train_ternary, time_train_ternary},
    {"values", check_train_values, time_train_values},
    {"tiles", check_train_tiles, time_train_tiles},
    {"linear", check_train_linear, NULL}, /* its products are timed above */
    {"scaled", check_train_scaled, time_train_scaled},
    {"norm", check_train_norm, time_train_norm},
    {"norm_back", check_train_norm_back, time_train_norm_back},
    {"gate", check_train_gate, time_train_gate},
    {"gate_back", check_train_gate_back, time_train_gate_back},
    {"rotated", check_train_rotated, time_train_rotated},
    {"softmax", check_train_softmax, time_train_softmax},
    {"entropy", check_train_entropy, time_train_entropy}};

static const struct {
    const char *name;
    void (*check)(test *t, int32_t type, const char *what);
    void (*time)(bench *b);
} attention_tests[] = {{"qk", check_qk, time_qk}, {"pv", check_pv, time_pv}};

#define COUNT(list) (sizeof(list) / sizeof *(list))

/* A new entry of a table must come with a test; the three limits of lookup need none. */
_Static_assert(sizeof(bn_product_kernels) == (COUNT(product_tests) + 3) * sizeof(void *), "");
_Static_assert(sizeof(bn_vector_kernels) == COUNT(vector_tests) * sizeof(void *), "");
_Static_assert(sizeof(bn_byte_kernels) == COUNT(byte_tests) * sizeof(void *), "");
_Static_assert(sizeof(bn_training_kernels) == COUNT(training_tests) * sizeof(void *), "");
/* weigh is tested together with pv. */
_Static_assert(sizeof(bn_attention_kernels) == (COUNT(attention_tests) + 1) * sizeof(void *), "");
_Static_assert(sizeof(bn_kernels) == sizeof(void *) + sizeof(bn_product_kernels) +
                                         sizeof(bn_vector_kernels) +
                                         BN_KV_TYPES * sizeof(bn_attention_kernels) +
                                         sizeof(bn_byte_kernels) + sizeof(bn_training_kernels),
               "a topic without tests");

static char running[80]; /* for the signal handler */

static void on_fault(int signal_number) {
    const char *fault = signal_number == SIGILL ? "illegal instruction" : "access outside a buffer";
    const char *part[] = {fault, " in ", running, "\n"};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (write(STDERR_FILENO, part[i], strlen(part[i])) < 0)
            break;
    _exit(1);
}

typedef struct run {
    const bn_kernels *tier, *scalar;
    uint64_t seed, cases;
    int n; /* kernels tested so far */
} run;

/* State of the test of the next kernel. */
static test begin(run *r, const char *name) {
    const uint64_t first = r->seed + (uint64_t)r->n++;
    snprintf(running, sizeof running, "%s of %s (--seed %" PRIu64 ")", name, r->tier->isa, r->seed);
    return (test){.tier = r->tier, .scalar = r->scalar, .random = first, .seed = r->seed};
}

static void check_topic(run *r, const kernel_test *tests, size_t n) {
    for (size_t i = 0; i < n; i++) {
        test t = begin(r, tests[i].name);
        for (uint64_t c = 0; c < r->cases; c++) {
            bn_like_intel = c % 2;
            tests[i].check(&t);
        }
    }
}

static void check_attention(run *r) {
    for (int32_t type = 0; type < BN_KV_TYPES; type++)
        for (size_t i = 0; i < COUNT(attention_tests); i++) {
            char name[32];
            snprintf(name, sizeof name, "%s_%s", attention_tests[i].name, bn_kv_name(type));
            test t = begin(r, name);
            for (uint64_t c = 0; c < r->cases; c++) {
                bn_like_intel = c % 2;
                attention_tests[i].check(&t, type, name);
            }
        }
}

static void check_tier(const bn_kernels *tier, const bn_kernels *scalar, uint64_t seed,
                       uint64_t cases) {
    run r = {.tier = tier, .scalar = scalar, .seed = seed, .cases = cases};
    const int like_intel = bn_like_intel;
    check_topic(&r, product_tests, COUNT(product_tests));
    check_topic(&r, vector_tests, COUNT(vector_tests));
    check_attention(&r);
    check_topic(&r, byte_tests, COUNT(byte_tests));
    check_topic(&r, training_tests, COUNT(training_tests));
    bn_like_intel = like_intel;
    printf("%-10s %d kernels x %" PRIu64 " cases equal the scalar ones\n", tier->isa, r.n, cases);
}

static void time_topic(bench *b, const kernel_test *tests, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (tests[i].time)
            tests[i].time(b);
}

static void bench_tier(const bn_kernels *tier, const bn_kernels *scalar) {
    bench b = bench_new(tier, scalar);
    bench_limits(&b);
    time_topic(&b, product_tests, COUNT(product_tests));
    time_topic(&b, vector_tests, COUNT(vector_tests));
    for (b.type = 0; b.type < BN_KV_TYPES; b.type++)
        for (size_t i = 0; i < COUNT(attention_tests); i++)
            attention_tests[i].time(&b);
    time_topic(&b, byte_tests, COUNT(byte_tests));
    time_topic(&b, training_tests, COUNT(training_tests));
    bench_free(&b);
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
