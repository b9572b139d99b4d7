/* SPDX-License-Identifier: MIT
 *
 * test_noise.c: how often each token is sampled. Counts are compared with probabilities by
 * chi-square, with a bound that correct code with fresh seeds would exceed once in a million; the
 * seeds are fixed, so a test that passes once always passes.
 */
#include "check.h"
#include "kernels/elementary.h"
#include "kernels/kernels.h"
#include "kernels/noise.h"
#include "session/sampler.h"

#include <math.h>

enum { MAX_VOCAB = 400, DRAWS = 20000 };

static bn_kernels kernels;
static void *scratch;
static const int32_t text[DRAWS]; /* without penalties only its length matters */

static int32_t sample(const bn_sampler *s, const float *logits, uint32_t vocab, uint64_t seed,
                      int32_t position) {
    int32_t token = -1;
    CHECK_EQ(bn_sample(s, &(bn_choices){logits, .n = vocab}, vocab, text, position, seed, scratch,
                       &kernels, &token),
             BN_OK);
    return token;
}

/* The bound that chi-square exceeds once in a million (Wilson and Hilferty). */
static double most_chi_square(int freedom) {
    const double spread = 2 / (9.0 * freedom), z = 4.7534;
    return freedom * pow(1 - spread + z * sqrt(spread), 3);
}

/* Compare counts[i] of n with p[i]; those below 5 on average are pooled, and p[i] = 0 must never
 * occur. */
static void check_counts(const int32_t *counts, const double *p, size_t size, double n,
                         const char *what) {
    double chi_square = 0, rare = 0, rare_count = 0;
    int freedom = -1;
    for (size_t i = 0; i < size; i++) {
        if (p[i] == 0)
            CHECK_MSG(counts[i] == 0, "%s: %d times what is ruled out", what, counts[i]);
        if (p[i] * n < 5) {
            rare += p[i] * n;
            rare_count += counts[i];
            continue;
        }
        chi_square += pow(counts[i] - n * p[i], 2) / (n * p[i]);
        freedom++;
    }
    if (rare >= 5) {
        chi_square += pow(rare_count - rare, 2) / rare;
        freedom++;
    }
    CHECK_MSG(freedom < 1 || chi_square < most_chi_square(freedom),
              "%s: chi-square %g of %d degrees of freedom", what, chi_square, freedom);
}

/* --- Numbers --- */

static void test_philox(void) {
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } known[] = {/* test vectors published by its authors */
                 {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                 {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                  {0xffffffff, 0xffffffff},
                  {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                 {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                  {0xa4093822, 0x299f31d0},
                  {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t words[4];
        bn_philox(known[i].counter, known[i].key, words);
        CHECK_MSG(memcmp(words, known[i].words, sizeof words) == 0, "answer %zu", i);
    }
}

static void test_log(void) {
    uint64_t random = 4;
    for (int i = 0; i < 50000; i++) {
        const double u = ((double)(check_random(&random) >> 12) + 0.5) * 0x1p-52;
        const double near_one = 1 - ldexp(u, -(int)check_below(&random, 50));
        const double small = ldexp(u, -(int)check_below(&random, 900));
        const double all[] = {u, near_one, small};
        for (int k = 0; k < 3; k++)
            CHECK_MSG(all[k] == 1 || fabs(bn_log(all[k]) / log(all[k]) - 1) < 1e-15, "log(%.17g)",
                      all[k]);
    }
}

/* Along tokens, positions and seeds, for small and large values: never 0 or 1, uniform, and
 * independent of earlier calls. */
static void test_uniform(void) {
    static const uint64_t bases[] = {0, 1, 1ull << 32, 0xffffffff00000000u};
    for (size_t b = 0; b < 4; b++)
        for (int way = 0; way < 3; way++) {
            int32_t counts[64] = {0}, pairs[64] = {0};
            double p[64], before = 0;
            for (int i = 0; i < DRAWS; i++) {
                bn_noise n = bn_noise_at(bases[b] + (way == 2 ? (uint64_t)i : 0),
                                         way == 1 ? (uint32_t)i : 7);
                const uint32_t token = way == 0 ? (uint32_t)i : 5;
                bn_noise_of(&n, token ^ 1);
                const double u = bn_noise_of(&n, token);
                bn_noise again = bn_noise_at(n.seed, n.position);
                CHECK(u > 0 && u < 1 && u == bn_noise_of(&again, token));
                counts[(int)(u * 64)]++;
                pairs[(int)(u * 8) * 8 + (int)(before * 8)] += i > 0;
                before = u;
            }
            for (int i = 0; i < 64; i++)
                p[i] = 1.0 / 64;
            check_counts(counts, p, 64, DRAWS, "one");
            check_counts(pairs, p, 64, DRAWS - 1, "two in a row");
        }
}

/* --- Tokens --- */

typedef struct entry {
    double weight;
    int32_t token;
} entry;

static int heavy_first(const void *left, const void *right) {
    const entry *a = left, *b = right;
    return a->weight != b->weight ? (a->weight > b->weight ? -1 : 1) : a->token - b->token;
}

/* Probabilities by definition: temperature, top_k, top_p, min_p. Returns 0 if rounding could decide
 * a cut. */
static int softmax(const bn_sampler *s, const float *logits, uint32_t vocab, double *p) {
    entry e[MAX_VOCAB];
    double total = 0, sum = 0;
    float best = -INFINITY;
    for (uint32_t i = 0; i < vocab; i++)
        best = logits[i] > best ? logits[i] : best;
    for (uint32_t i = 0; i < vocab; i++)
        e[i] = (entry){exp((double)(logits[i] - best) / (double)s->temperature), (int32_t)i};
    qsort(e, vocab, sizeof *e, heavy_first);
    size_t n = s->top_k && s->top_k < (int32_t)vocab ? (size_t)s->top_k : vocab;
    for (size_t i = 0; i < n; i++)
        total += e[i].weight;
    for (size_t i = 0; s->top_p > 0 && i < n; i++) {
        sum += e[i].weight;
        if (fabs(sum / total - (double)s->top_p) < 1e-5)
            return 0;
        if (sum > (double)s->top_p * total)
            n = i + 1;
    }
    for (size_t i = 0; i < n; i++)
        if (fabs(e[i].weight - (double)s->min_p) < 1e-5 * (double)s->min_p)
            return 0;
    while (e[n - 1].weight < (double)s->min_p)
        n--;
    sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += e[i].weight;
    memset(p, 0, vocab * sizeof *p);
    for (size_t i = 0; i < n; i++)
        p[e[i].token] = e[i].weight / sum;
    return 1;
}

static void random_logits(float *logits, uint32_t vocab, float spread, uint64_t *random) {
    for (uint32_t i = 0; i < vocab; i++)
        logits[i] = spread * (check_float(random) + check_float(random) + check_float(random));
}

/* With consecutive seeds at one position, then at consecutive positions with one seed. */
static void test_distributions(void) {
    static const bn_sampler samplers[] = {
        {.temperature = 1},
        {.temperature = 0.5f},
        {.temperature = 2, .top_k = 3},
        {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f},
        {.temperature = 0.8f, .top_k = 300},
        {.temperature = 1, .top_p = 0.6f},
        {.temperature = 1.3f, .min_p = 0.1f},
    };
    uint64_t random = 8;
    int tested = 0;
    for (size_t i = 0; i < 4 * sizeof samplers / sizeof *samplers; i++) {
        const bn_sampler *s = &samplers[i / 4];
        const uint32_t vocab = (uint32_t[]){2, 5, 37, MAX_VOCAB}[i % 4];
        float logits[MAX_VOCAB];
        double p[MAX_VOCAB];
        random_logits(logits, vocab, 1.5f, &random);
        if (!softmax(s, logits, vocab, p))
            continue;
        for (int way = 0; way < 2; way++) {
            int32_t counts[MAX_VOCAB] = {0};
            for (int32_t d = 0; d < DRAWS / 4; d++)
                counts[way ? sample(s, logits, vocab, i, d)
                           : sample(s, logits, vocab, (uint64_t)d, (int32_t)i)]++;
            check_counts(counts, p, vocab, DRAWS / 4, way ? "positions" : "seeds");
        }
        tested++;
    }
    CHECK_MSG(tested > 20, "only %d were tested", tested);
}

/* Tokens at consecutive positions are independent, and so are those of consecutive seeds. */
static void test_independence(void) {
    const bn_sampler s = {.temperature = 1};
    const float logits[4] = {0, 0.7f, -0.5f, 0.2f};
    double p[4], both[16];
    CHECK(softmax(&s, logits, 4, p));
    for (int i = 0; i < 16; i++)
        both[i] = p[i / 4] * p[i % 4];
    int32_t positions[16] = {0}, seeds[16] = {0};
    for (int32_t d = 0; d < DRAWS; d++) {
        const int32_t here = sample(&s, logits, 4, (uint64_t)d, 11);
        positions[4 * here + sample(&s, logits, 4, (uint64_t)d, 12)]++;
        seeds[4 * here + sample(&s, logits, 4, (uint64_t)(d + DRAWS), 11)]++;
    }
    check_counts(positions, both, 16, DRAWS, "two positions");
    check_counts(seeds, both, 16, DRAWS, "two seeds");
}

/* The inversion method: one uniform number, and the first token where the cumulative probability
 * exceeds it. Both sets of counts must be from the same distribution. */
static void test_against_inversion(void) {
    enum { VOCAB = 50 };
    const bn_sampler s = {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.02f};
    float logits[VOCAB];
    double p[VOCAB], chi_square = 0;
    int32_t ours[VOCAB] = {0}, theirs[VOCAB] = {0};
    uint64_t random = 21;
    random_logits(logits, VOCAB, 1.5f, &random);
    CHECK(softmax(&s, logits, VOCAB, p));
    for (int32_t d = 0; d < DRAWS; d++) {
        double left = (double)(check_random(&random) >> 11) * 0x1p-53;
        int32_t token = 0;
        while (token + 1 < VOCAB && (left -= p[token]) >= 0)
            token++;
        theirs[token]++;
        ours[sample(&s, logits, VOCAB, (uint64_t)d, 3)]++;
    }
    int freedom = -1;
    for (int i = 0; i < VOCAB; i++) {
        CHECK_EQ(ours[i] > 0, p[i] > 0);
        if (ours[i] + theirs[i] < 10)
            continue;
        chi_square += pow(ours[i] - theirs[i], 2) / (ours[i] + theirs[i]);
        freedom++;
    }
    CHECK_MSG(freedom > 5 && chi_square < most_chi_square(freedom),
              "chi-square %g of %d degrees of freedom", chi_square, freedom);
}

/* A guess with the same noise is right as often as promised; a guess with other noise is not. */
static void test_guesses(void) {
    enum { VOCAB = MAX_VOCAB, ROWS = 300, TIMES = 20 };
    const bn_sampler s = {.temperature = 1, .top_p = 0.95f};
    uint64_t random = 5;
    double promised = 0;
    int right = 0, right_elsewhere = 0;
    for (uint64_t row = 0; row < ROWS; row++) {
        float logits[VOCAB], guess[VOCAB];
        double p[VOCAB], q[VOCAB], apart = 0;
        random_logits(logits, VOCAB, 1.5f, &random);
        for (int i = 0; i < VOCAB; i++)
            guess[i] = logits[i] + 0.4f * check_float(&random);
        if (!softmax(&s, logits, VOCAB, p) || !softmax(&s, guess, VOCAB, q))
            continue;
        for (int i = 0; i < VOCAB; i++)
            apart += fabs(p[i] - q[i]) / 2;
        promised += (1 - apart) / (1 + apart) * (double)TIMES;
        for (int32_t at = 0; at < TIMES; at++) {
            const int32_t token = sample(&s, logits, VOCAB, row, at);
            right += token == sample(&s, guess, VOCAB, row, at);
            right_elsewhere += token == sample(&s, guess, VOCAB, row + ROWS, at);
        }
    }
    const double noise = sqrt(ROWS * TIMES) / 2; /* upper bound of the count's standard deviation */
    CHECK_MSG(right > promised - 4.7534 * noise, "%d right, promised %g", right, promised);
    CHECK_MSG(right > 10 * right_elsewhere, "%d right, %d elsewhere", right, right_elsewhere);
}

int main(void) {
    bn_kernels_scalar(&kernels);
    scratch = malloc(bn_sample_scratch_size(MAX_VOCAB));
    CHECK(scratch != NULL);
    test_philox();
    test_log();
    test_uniform();
    test_distributions();
    test_independence();
    test_against_inversion();
    test_guesses();
    free(scratch);
    return 0;
}
