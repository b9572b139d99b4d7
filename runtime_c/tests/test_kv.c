/* SPDX-License-Identifier: MIT
 *
 * test_kv.c: the error of a score when its key comes from a cache, for every type.
 */
#include "check.h"
#include "kv.h"

#include <math.h>

enum { MOST = BN_MAX_HEAD };

static bn_kernels kernels;
static float key[MOST], query[MOST];

static void draw(uint64_t *random, size_t n) {
    for (size_t d = 0; d < n; d++)
        key[d] = check_float(random), query[d] = check_float(random);
}

static double exact(size_t n) {
    double sum = 0;
    for (size_t d = 0; d < n; d++)
        sum += (double)key[d] * (double)query[d];
    return sum;
}

static void encode(bn_kv_encode *to, int8_t *q, float *scale, const float *x, size_t n) {
    int32_t sum;
    to(&kernels, &(bn_quantizing){.q = q, .s = scale, .sums = &sum, .x = x, .n = n, .rows = 1});
}

/* The score of the key, stored as the last of a tile whose other keys are 0. */
static double scored(int32_t type, size_t n) {
    static _Alignas(64) uint8_t numbers[MOST * 4], tile[MOST * 4 * BN_LANES];
    static _Alignas(64) int8_t codes[2 * MOST];
    const bn_kv *kv = &bn_kv_types[type];
    const void *words = key;
    float scores[BN_LANES], q_scale = 1, k_scale;
    if (kv->encode_key)
        encode(kv->encode_key, (int8_t *)numbers, &k_scale, key, n), words = numbers;
    for (size_t w = 0; w < bn_kv_words(kv, n); w++)
        memcpy(tile + (w * BN_LANES + BN_LANES - 1) * kv->word,
               (const uint8_t *)words + w * kv->word, kv->word);
    if (kv->encode_query)
        encode(kv->encode_query, codes, &q_scale, query, n);
    kernels.attention[type].qk(&(bn_qk){.scores = scores,
                                        .score_stride = BN_LANES,
                                        .q = query,
                                        .codes = codes,
                                        .q_scale = &q_scale,
                                        .n_q = 1,
                                        .k = tile,
                                        .head_dim = n,
                                        .tiles = 1});
    return (double)scores[BN_LANES - 1];
}

static double length(const float *x, size_t n) {
    double sum = 0;
    for (size_t d = 0; d < n; d++)
        sum += (double)x[d] * (double)x[d];
    return sqrt(sum);
}

/* By Cauchy-Schwarz, |error| <= |q| |k - stored| + |q - stored| |stored|; rotation preserves
 * lengths up to rounding. A value is off by at most `step` times the largest, which is at most the
 * vector's length, so a vector by step · sqrt(n) of its length: 2^-11 for f16, half of 1/127 for
 * int8; 1/15 for 4 bits, and 2^-8 for their scale. */
static void test_error(void) {
    static const double of_key[BN_KV_TYPES] = {1 / 2048., 0, 0.5 / 127, 1.005 / 15};
    static const double of_query[BN_KV_TYPES] = {0, 0, 0.5 / 127, 0.5 / 127};
    uint64_t random = 5;
    for (int32_t type = 0; type < BN_KV_TYPES; type++)
        for (int round = 0; round < 300; round++) {
            const size_t n = 1 + check_below(&random, round < 150 ? 160 : MOST);
            draw(&random, n);
            const double size = length(key, n) * length(query, n), root = sqrt((double)n);
            const double k = of_key[type] * root, q = of_query[type] * root;
            const double most = size * (k + q + k * q + 1e-6 * root), found = scored(type, n);
            CHECK_MSG(fabs(found - exact(n)) <= most, "%s of %zu: %g, expected %g +- %g",
                      bn_kv_name(type), n, found, exact(n), most);
        }
}

/* One dimension of 4 bits is 15 times its scale, which is rounded to 8 bits: 2^-8 off at most. */
static void test_scale(void) {
    uint64_t random = 9;
    query[0] = 1;
    for (int round = 0; round < 1000; round++) {
        key[0] = check_float(&random);
        const double x = (double)key[0], found = scored(BN_KV_K4V8, 1);
        CHECK_MSG(fabs(found - x) <= fabs(x) * (1 / 256. + 1e-6), "%g, expected %g", found, x);
    }
}

/* Root mean square error of scores, in units of |q| |k| / sqrt(n). */
static double noise(int32_t type, size_t n, float outlier) {
    enum { ROUNDS = 2000 };
    uint64_t random = 7;
    double sum = 0;
    for (int round = 0; round < ROUNDS; round++) {
        draw(&random, n);
        key[n / 3] *= outlier;
        const double unit = length(key, n) * length(query, n) / sqrt((double)n);
        const double error = (scored(type, n) - exact(n)) / unit;
        sum += error * error / (double)ROUNDS;
    }
    return sqrt(sum);
}

/* One dimension 30 times as large as the others would use up the 4 bits of its group, and leave an
 * error of 30 · 2/15 / sqrt(12) = 1.2. After rotation the error is as without it: the largest of 32
 * normal numbers is 2.37 deviations, so a number is off by 2.37 · 2/15 / sqrt(12) = 0.091. */
static void test_outliers(void) {
    static const size_t sizes[] = {64, 128, 256};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (float outlier = 1; outlier < 31; outlier += 29) {
            const double found = noise(BN_KV_K4V8, sizes[i], outlier);
            CHECK_MSG(found < 0.095, "%zu: noise %g", sizes[i], found);
        }
}

/* NaN, infinities and zero vectors are stored as well. */
static void test_ends(void) {
    memset(key, 0, sizeof key);
    memset(query, 0, sizeof query);
    for (int32_t type = 0; type < BN_KV_TYPES; type++)
        for (size_t n = 1; n < 200; n++)
            CHECK(scored(type, n) == 0);
    query[0] = 1;
    for (int which = 0; which < 3; which++) {
        key[70] = which == 0 ? NAN : which == 1 ? INFINITY : -INFINITY;
        for (int32_t type = 0; type < BN_KV_TYPES; type++)
            CHECK_MSG(isnan(scored(type, 128)), "%s, case %d", bn_kv_name(type), which);
    }
}

int main(void) {
    bn_kernels_scalar(&kernels);
    test_error();
    test_scale();
    test_outliers();
    test_ends();
    return 0;
}
