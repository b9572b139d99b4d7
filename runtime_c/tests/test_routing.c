/* SPDX-License-Identifier: MIT
 *
 * test_routing.c: which experts a token takes, on every tier, compared with a simple search: the
 * same experts, and the same bits of their shares.
 */
#include "routing.h"

#include <math.h>

#include "bitnet_runtime.h"
#include "check.h"

enum { MOST = 300, TIMES = 400 };

typedef struct route {
    float p[MOST], share[MOST];
    uint32_t expert[MOST];
    int finite;
} route;

static route found_by(const bn_kernels *kernels, bn_choice choice, const float *logits) {
    static uint64_t keys[MOST];
    route r = {.finite = 1};
    memcpy(r.p, logits, choice.experts * sizeof *logits);
    r.finite = bn_route(kernels, &choice, r.p, keys, r.expert, r.share);
    return r;
}

/* Take the largest remaining one, k times. */
static route searched(const bn_kernels *scalar, bn_choice choice, const float *logits) {
    const size_t n = choice.experts;
    int taken[MOST] = {0};
    route r = {.finite = 1};
    float total = 0;
    memcpy(r.p, logits, n * sizeof *logits);
    const float sum = scalar->vectors.exp_sum(r.p, n, scalar->vectors.max(logits, n));
    for (size_t e = 0; e < n; e++)
        r.p[e] /= sum;
    for (size_t j = 0; j < choice.taken; j++) {
        size_t best = n;
        for (size_t e = 0; e < n; e++)
            if (!taken[e] && (best == n || r.p[e] > r.p[best]))
                best = e;
        taken[best] = 1;
        r.expert[j] = (uint32_t)best;
        r.share[j] = r.p[best];
        total += r.share[j];
    }
    for (size_t j = 0; j < choice.taken && choice.normalize; j++)
        r.share[j] /= total;
    return r;
}

/* p is a softmax: fp32 and a polynomial with error 1.2e-7, over at most 300 terms. */
static void check_softmax(const float *p, const float *logits, size_t n) {
    double sum = 0;
    for (size_t e = 0; e < n; e++)
        sum += exp((double)logits[e]);
    for (size_t e = 0; e < n; e++)
        CHECK(fabs((double)p[e] - exp((double)logits[e]) / sum) < 1e-6);
}

static void test_all_tiers(bn_choice choice, const float *logits) {
    bn_kernels kernels;
    bn_kernels_scalar(&kernels);
    const route expected = searched(&kernels, choice, logits);
    const size_t k = choice.taken;
    check_softmax(expected.p, logits, choice.experts);
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++) {
        CHECK(bn_kernels_select(&kernels, bn_isa_name(i)));
        const route r = found_by(&kernels, choice, logits);
        CHECK(r.finite);
        CHECK(memcmp(r.expert, expected.expert, k * sizeof *r.expert) == 0);
        CHECK(memcmp(r.share, expected.share, k * sizeof *r.share) == 0);
        CHECK(memcmp(r.p, expected.p, choice.experts * sizeof *r.p) == 0);
    }
}

/* Every number of experts and of those taken; few distinct logits, so that there are many ties. */
static void test_random(void) {
    uint64_t random = 1;
    for (int i = 0; i < TIMES; i++) {
        float logits[MOST];
        const size_t n = 1 + check_below(&random, i % 2 ? 20 : MOST), levels = 1 + (size_t)i % 7;
        const bn_choice choice = {n, 1 + check_below(&random, n), i % 3 > 0};
        for (size_t e = 0; e < n; e++)
            logits[e] = i % 4 ? (float)check_below(&random, levels) : 9 * check_float(&random);
        test_all_tiers(choice, logits);
    }
}

static void test_by_hand(void) {
    const float logits[] = {0, 2, 1, 2}, far[] = {-1000, 50, -1000, 60};
    bn_kernels kernels;
    bn_kernels_select(&kernels, NULL);
    route r = found_by(&kernels, (bn_choice){4, 2, 1}, logits);
    CHECK(r.expert[0] == 1 && r.expert[1] == 3 && r.share[0] == 0.5f && r.share[1] == 0.5f);
    r = found_by(&kernels, (bn_choice){4, 2, 0}, logits);
    CHECK(r.expert[0] == 1 && r.expert[1] == 3 && r.share[0] < 0.5f && r.share[0] > 0.39f);
    r = found_by(&kernels, (bn_choice){4, 3, 1}, far);
    CHECK(r.expert[0] == 3 && r.expert[1] == 1 && r.expert[2] == 0 && r.share[0] > 0.999f);
}

/* Values that are not finite are reported, and the experts are still valid indices. */
static void test_not_finite(void) {
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    uint64_t random = 5;
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++) {
        bn_kernels kernels;
        CHECK(bn_kernels_select(&kernels, bn_isa_name(i)));
        for (int t = 0; t < TIMES; t++) {
            float logits[MOST];
            int taken[MOST] = {0};
            const size_t n = 1 + check_below(&random, 40), k = 1 + check_below(&random, n);
            for (size_t e = 0; e < n; e++)
                logits[e] = check_below(&random, 4) ? check_float(&random) : bad[t % 4];
            logits[check_below(&random, n)] = bad[t % 4];
            const route r = found_by(&kernels, (bn_choice){n, k, t % 2}, logits);
            CHECK(!r.finite);
            for (size_t j = 0; j < k; j++) {
                CHECK(r.expert[j] < n && !taken[r.expert[j]]);
                taken[r.expert[j]] = 1;
            }
        }
    }
}

int main(void) {
    test_by_hand();
    test_random();
    test_not_finite();
    return 0;
}
