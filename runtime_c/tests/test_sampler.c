/* SPDX-License-Identifier: MIT
 *
 * test_sampler.c: bn_sample compared with a simple reference (double precision, everything sorted),
 * then edge cases and refusals. Frequencies are tested in test_noise.c.
 */
#include "check.h"
#include "kernels/kernels.h"
#include "kernels/noise.h"
#include "session/sampler.h"

#include <math.h>

enum { MAX_VOCAB = 3000, MAX_TOKENS = 64, MAX_BIAS = 4 };

static const bn_sampler plain = {
    .temperature = 1, .top_p = 1, .repeat_penalty = 1, .penalty_window = -1};

static bn_kernels kernels;
static void *scratch;

static bn_status sample_behind(const bn_sampler *s, const float *logits, uint32_t vocab,
                               const int32_t *tokens, int32_t n_tokens, uint64_t seed,
                               int32_t *token) {
    const bn_choices all = {logits, .n = vocab};
    return bn_sample(s, &all, vocab, tokens, n_tokens, seed, scratch, &kernels, token);
}

static bn_status sample(const bn_sampler *s, const float *logits, uint32_t vocab, uint64_t seed,
                        int32_t *token) {
    return sample_behind(s, logits, vocab, NULL, 0, seed, token);
}

/* --- The reference --- */

typedef struct entry {
    float logit;
    int32_t token;
    double weight;
} entry;

static int by_falling_logit(const void *left, const void *right) {
    const entry *a = left, *b = right;
    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return a->token < b->token ? -1 : 1;
}

static void adjust(const bn_sampler *s, float *x, uint32_t vocab, const int32_t *tokens,
                   int32_t n) {
    for (int32_t i = 0; i < s->n_bias; i++)
        x[s->bias_tokens[i]] += s->bias_values[i];
    const int32_t first =
        s->penalty_window < 0 || n < s->penalty_window ? 0 : n - s->penalty_window;
    for (int32_t token = 0; token < (int32_t)vocab; token++) {
        int32_t count = 0;
        for (int32_t i = first; i < n; i++)
            count += tokens[i] == token;
        if (count == 0)
            continue;
        x[token] = x[token] > 0 ? x[token] / s->repeat_penalty : x[token] * s->repeat_penalty;
        x[token] -= s->presence_penalty + s->frequency_penalty * (float)count;
    }
}

/* The weights of bn_exp are accurate to 2e-7 relative: a closer decision may fall either way. */
static int near(double a, double b, double scale) {
    return fabs(a - b) < 2e-6 * scale;
}

/* The shortest of exponential waiting times with these rates. */
static int32_t soonest(const entry *e, size_t n, uint64_t seed, uint32_t position) {
    double first = INFINITY, second = INFINITY;
    int32_t token = -1;
    for (size_t i = 0; i < n; i++) {
        const uint32_t id = (uint32_t)e[i].token;
        uint32_t words[4];
        bn_philox((uint32_t[]){id / 2, position, 0, 0},
                  (uint32_t[]){(uint32_t)seed, (uint32_t)(seed >> 32)}, words);
        const uint64_t r = (uint64_t)words[id % 2 * 2] << 32 | words[id % 2 * 2 + 1];
        const double wait = -log(((double)(r >> 12) + 0.5) / 4503599627370496.0) / e[i].weight;
        second = wait < first ? first : wait < second ? wait : second;
        token = wait < first ? e[i].token : token;
        first = wait < first ? wait : first;
    }
    return near(first, second, first) ? -2 : token;
}

/* The token; -1 if no token is left, -2 if rounding decides. */
static int32_t reference(const bn_sampler *s, const float *logits, uint32_t vocab,
                         const int32_t *tokens, int32_t n_tokens, uint64_t seed) {
    static float x[MAX_VOCAB];
    static entry e[MAX_VOCAB];
    memcpy(x, logits, vocab * sizeof *x);
    adjust(s, x, vocab, tokens, n_tokens);
    size_t n = 0;
    for (uint32_t i = 0; i < vocab; i++)
        if (x[i] > -INFINITY)
            e[n++] = (entry){x[i], (int32_t)i, 0};
    if (n == 0)
        return -1;
    qsort(e, n, sizeof *e, by_falling_logit);
    if (s->temperature == 0)
        return e[0].token;
    if (s->top_k > 0 && n > (size_t)s->top_k)
        n = (size_t)s->top_k;
    double total = 0, sum = 0;
    for (size_t i = 0; i < n; i++) {
        e[i].weight = exp(((double)e[i].logit - (double)e[0].logit) / (double)s->temperature);
        total += e[i].weight;
    }
    for (size_t i = 0; s->top_p < 1 && i < n; i++) {
        sum += e[i].weight;
        if (near(sum, s->top_p * total, total))
            return -2;
        if (sum > s->top_p * total)
            n = i + 1;
    }
    for (size_t i = 1; i < n; i++)
        if (near(e[i].weight, s->min_p, s->min_p))
            return -2;
    while (e[n - 1].weight < s->min_p)
        n--;
    return soonest(e, n, seed, (uint32_t)n_tokens);
}

/* Only the logits that are not -INFINITY. */
static bn_choices left_of(const float *logits, uint32_t vocab) {
    static float x[MAX_VOCAB];
    static uint32_t tokens[MAX_VOCAB];
    uint32_t n = 0;
    for (uint32_t i = 0; i < vocab; i++)
        if (logits[i] > -INFINITY)
            x[n] = logits[i], tokens[n++] = i;
    return (bn_choices){x, tokens, n};
}

static float pick(uint64_t *r, const float *values, size_t n) {
    return values[check_below(r, n)];
}

static void test_against_reference(void) {
    static float logits[MAX_VOCAB];
    int32_t tokens[MAX_TOKENS], bias_tokens[MAX_BIAS];
    float bias_values[MAX_BIAS];
    int undecided = 0;
    enum { CASES = 6000 };
    for (uint64_t seed = 0; seed < CASES; seed++) {
        uint64_t r = seed;
        const uint32_t vocab =
            1 + (uint32_t)check_below(&r, (size_t[]){3, 40, 300, MAX_VOCAB}[seed % 4]);
        const float spread = pick(&r, (float[]){0.01f, 3, 20}, 3);
        const int ties = check_below(&r, 2) == 0, bans = check_below(&r, 3) == 0;
        for (uint32_t i = 0; i < vocab; i++) {
            logits[i] = spread * check_float(&r);
            logits[i] = ties ? rintf(logits[i] * 2) / 2 : logits[i];
            logits[i] = bans && check_below(&r, 2) == 0 ? -INFINITY : logits[i];
        }
        const int32_t n_tokens = (int32_t)check_below(&r, MAX_TOKENS);
        for (int32_t i = 0; i < n_tokens; i++)
            tokens[i] = (int32_t)check_below(&r, vocab < 20 ? vocab : 20);
        bn_sampler s = {.temperature = pick(&r, (float[]){0, 0.3f, 0.8f, 1, 2}, 5),
                        .top_k = (int32_t)pick(&r, (float[]){0, 0, 1, 2, 10, 40, 500, 1e6f}, 8),
                        .top_p = pick(&r, (float[]){1, 1, 0.95f, 0.7f, 0.3f, 1e-6f}, 6),
                        .min_p = pick(&r, (float[]){0, 0, 0.05f, 0.3f, 0.9f}, 5),
                        .repeat_penalty = pick(&r, (float[]){1, 1, 1.3f, 0.7f}, 4),
                        .presence_penalty = pick(&r, (float[]){0, 0, 0.6f, -0.4f}, 4),
                        .frequency_penalty = pick(&r, (float[]){0, 0, 0.2f, -0.1f}, 4),
                        .penalty_window = (int32_t)pick(&r, (float[]){-1, 0, 1, 16, 1000}, 5),
                        .n_bias = (int32_t)check_below(&r, MAX_BIAS + 1),
                        .bias_tokens = bias_tokens,
                        .bias_values = bias_values};
        for (int32_t i = 0; i < s.n_bias; i++) {
            bias_tokens[i] = (int32_t)check_below(&r, vocab);
            bias_values[i] = pick(&r, (float[]){5, -5, 0.1f, -INFINITY}, 4);
        }
        const int32_t expected = reference(&s, logits, vocab, tokens, n_tokens, r);
        const bn_choices left = left_of(logits, vocab);
        int32_t token = -1, of_those_left = -1;
        const bn_status status = sample_behind(&s, logits, vocab, tokens, n_tokens, r, &token);
        CHECK_EQ(
            bn_sample(&s, &left, vocab, tokens, n_tokens, r, scratch, &kernels, &of_those_left),
            status);
        CHECK_EQ(of_those_left, token);
        const int32_t found = status == BN_OK ? token : -1;
        CHECK_MSG(status == (expected == -1 ? BN_ERR_NUMERIC : BN_OK), "case %d: status %d",
                  (int)seed, (int)status);
        undecided += expected == -2;
        CHECK_MSG(found == expected || expected == -2,
                  "case %d: token %d, expected %d (vocab %u, temperature %g, top_k %d, top_p %g, "
                  "min_p %g)",
                  (int)seed, found, expected, vocab, (double)s.temperature, s.top_k,
                  (double)s.top_p, (double)s.min_p);
    }
    CHECK_MSG(undecided < CASES / 100, "%d cases were left to rounding", undecided);
}

/* --- Edges --- */

static void test_greedy(void) {
    const float logits[] = {-1, 3, 2, 3, -INFINITY};
    int32_t token = -1;
    CHECK_EQ(sample(NULL, logits, 5, 5, &token), BN_OK);
    CHECK_EQ(token, 1); /* the lower id of the tie */

    bn_sampler s = plain; /* a temperature near 0 equals greedy, except for ties */
    s.temperature = 1e-30f;
    s.top_k = 1;
    CHECK_EQ(sample(&s, logits, 5, 5, &token), BN_OK);
    CHECK_EQ(token, 1);

    const float low[] = {-3e38f, -2e38f};
    CHECK_EQ(sample(NULL, low, 2, 5, &token), BN_OK);
    CHECK_EQ(token, 1);
}

/* Zero means off: each field alone acts as it does with neutral values in the others. */
static void test_zero_is_off(void) {
    static const bn_sampler alone[] = {
        {0},
        {.temperature = 0.8f},
        {.temperature = 1, .top_k = 3},
        {.temperature = 1, .top_p = 0.7f},
        {.temperature = 1, .min_p = 0.2f},
        {.temperature = 1, .repeat_penalty = 1.5f, .penalty_window = -1},
        {.temperature = 1, .presence_penalty = 1, .penalty_window = 2},
        {.temperature = 1, .frequency_penalty = 1, .penalty_window = -1},
        {.temperature = 1, .repeat_penalty = 1.5f}, /* but no window */
    };
    const int32_t seen[] = {3, 1, 1};
    uint64_t random = 3;
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++) {
        bn_sampler neutral = alone[i];
        neutral.top_p = neutral.top_p == 0 ? 1 : neutral.top_p;
        neutral.repeat_penalty = neutral.repeat_penalty == 0 ? 1 : neutral.repeat_penalty;
        for (uint64_t draw = 0; draw < 200; draw++) {
            int32_t token = -1, expected = -1;
            float logits[6];
            for (int v = 0; v < 6; v++)
                logits[v] = 2 * check_float(&random);
            CHECK_EQ(sample_behind(&alone[i], logits, 6, seen, 3, draw, &token), BN_OK);
            CHECK_EQ(sample_behind(&neutral, logits, 6, seen, 3, draw, &expected), BN_OK);
            CHECK_EQ(token, expected);
        }
    }
}

/* Banned tokens never occur, however flat the distribution and however many draws. */
static void test_banned(void) {
    float logits[64];
    for (int i = 0; i < 64; i++)
        logits[i] = i % 2 ? 0 : -INFINITY;
    const bn_sampler all = plain;
    bn_sampler most = plain;
    most.top_k = 50;
    for (uint64_t seed = 0; seed < 20000; seed++) {
        int32_t token = -1;
        CHECK_EQ(sample(seed % 2 ? &all : &most, logits, 64, seed, &token), BN_OK);
        CHECK_EQ(token % 2, 1);
    }
}

/* Equal logits: top_k, top_p and min_p = 1 keep the lower ids. */
static void test_ties(void) {
    float logits[40] = {0};
    bn_sampler k = plain, p = plain, m = plain;
    k.top_k = 3;
    p.top_p = 0.24f; /* 10 of 40 */
    m.min_p = 1;
    logits[39] = -1;
    int32_t largest_k = 0, largest_p = 0, largest_m = 0, token = -1;
    for (uint64_t seed = 0; seed < 5000; seed++) {
        CHECK_EQ(sample(&k, logits, 40, seed, &token), BN_OK);
        largest_k = token > largest_k ? token : largest_k;
        CHECK_EQ(sample(&p, logits, 40, seed, &token), BN_OK);
        largest_p = token > largest_p ? token : largest_p;
        CHECK_EQ(sample(&m, logits, 40, seed, &token), BN_OK);
        largest_m = token > largest_m ? token : largest_m;
    }
    CHECK_EQ(largest_k, 2);
    CHECK_EQ(largest_p, 9);
    CHECK_EQ(largest_m, 38);
    p.top_p = 0.5f; /* exactly the first of two */
    for (uint64_t seed = 0; seed < 50; seed++) {
        CHECK_EQ(sample(&p, logits, 2, seed, &token), BN_OK);
        CHECK_EQ(token, 0);
    }
}

static void test_penalties(void) {
    const float logits[] = {2, 1.9f, -1, -1.1f};
    const int32_t seen[] = {0, 0, 2, 1, 2};
    bn_sampler s = plain;
    s.temperature = 0;
    int32_t token = -1;
    const struct {
        float repeat, presence, frequency;
        int32_t window, expected;
    } cases[] = {
        {1, 0, 0, -1, 0},    {1.5f, 0, 0, 5, 0}, /* 0 and 1 are both lowered */
        {1.5f, 0, 0, 2, 0},                      /* only 1 and 2 */
        {1, 0, 0.2f, -1, 1}, {1, 0, 0.2f, 2, 0}, /* two of 0 cost more than one of 1 */
        {1, 3, 0, 0, 0},                         /* an empty window */
        {9, 9, 0, -1, 3},                        /* the unseen one is left */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        s.repeat_penalty = cases[i].repeat;
        s.presence_penalty = cases[i].presence;
        s.frequency_penalty = cases[i].frequency;
        s.penalty_window = cases[i].window;
        CHECK_EQ(sample_behind(&s, logits, 4, seen, 5, 0, &token), BN_OK);
        CHECK_MSG(token == cases[i].expected, "penalty case %zu: token %d", i, token);
    }
}

static void test_refusals(void) {
    const float nan = NAN, inf = INFINITY;
    const float good[] = {1, 2, 3};
    const int32_t inside[] = {2}, outside[] = {3}, negative[] = {-1};
    const float one[] = {1}, none[] = {nan}, most[] = {inf};
    const bn_sampler refused[] = {
        {.temperature = -1, .top_p = 1, .repeat_penalty = 1},
        {.temperature = nan, .top_p = 1, .repeat_penalty = 1},
        {.temperature = inf, .top_p = 1, .repeat_penalty = 1},
        {.top_k = -1, .top_p = 1, .repeat_penalty = 1},
        {.top_p = -0.1f, .repeat_penalty = 1},
        {.top_p = 1.01f, .repeat_penalty = 1},
        {.top_p = nan, .repeat_penalty = 1},
        {.top_p = 1, .min_p = -0.1f, .repeat_penalty = 1},
        {.top_p = 1, .min_p = 1.1f, .repeat_penalty = 1},
        {.top_p = 1, .min_p = nan, .repeat_penalty = 1},
        {.top_p = 1, .repeat_penalty = -1},
        {.top_p = 1, .repeat_penalty = nan},
        {.top_p = 1, .repeat_penalty = inf},
        {.top_p = 1, .repeat_penalty = 1, .presence_penalty = nan},
        {.top_p = 1, .repeat_penalty = 1, .frequency_penalty = inf},
        {.top_p = 1, .repeat_penalty = 1, .penalty_window = -2},
        {.top_p = 1, .repeat_penalty = 1, .n_bias = -1},
        {.top_p = 1, .repeat_penalty = 1, .n_bias = 1},
        {.top_p = 1, .repeat_penalty = 1, .n_bias = 1, .bias_tokens = inside},
        {.top_p = 1, .repeat_penalty = 1, .n_bias = 1, .bias_tokens = outside, .bias_values = one},
        {.top_p = 1, .repeat_penalty = 1, .n_bias = 1, .bias_tokens = negative, .bias_values = one},
        {.top_p = 1, .repeat_penalty = 1, .n_bias = 1, .bias_tokens = inside, .bias_values = none},
        {.top_p = 1, .repeat_penalty = 1, .n_bias = 1, .bias_tokens = inside, .bias_values = most},
    };
    int32_t token = 77;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        CHECK_MSG(sample(&refused[i], good, 3, 3, &token) == BN_ERR_ARGUMENT, "entry %zu", i);
    CHECK_EQ(sample(&plain, good, 0, 3, &token), BN_ERR_ARGUMENT);
    CHECK_EQ(sample_behind(&plain, good, 3, NULL, 1, 3, &token), BN_ERR_ARGUMENT);

    bn_sampler s = plain;
    s.presence_penalty = 1;
    CHECK_EQ(sample_behind(&s, good, 3, outside, 1, 3, &token), BN_ERR_TOKEN);

    const float bad[][3] = {
        {-inf, -inf, -inf}, {nan, nan, nan}, {1, nan, 2}, {1, inf, 2}, {nan, -inf, -inf}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_EQ(sample(&plain, bad[i], 3, 3, &token), BN_ERR_NUMERIC);
        CHECK_EQ(sample(NULL, bad[i], 3, 3, &token), BN_ERR_NUMERIC);
    }
    CHECK_EQ(token, 77);
}

/* A hash of many tokens from one large vocabulary. */
static uint64_t fingerprint(const char *isa, const float *logits, uint32_t vocab, void *room) {
    bn_kernels table;
    CHECK(bn_kernels_select(&table, isa));
    bn_sampler s = plain;
    uint64_t hash = 0;
    for (int i = 0; i < 40; i++) {
        s.temperature = 0.5f + 0.1f * (float)(i % 8);
        s.top_k = i % 4 == 0 ? 0 : 40 * i;
        s.top_p = i % 3 == 0 ? 1 : 0.95f;
        s.min_p = i % 5 == 0 ? 0 : 0.01f;
        int32_t token = -1;
        CHECK_EQ(bn_sample(&s, &(bn_choices){logits, .n = vocab}, vocab, NULL, 0, (uint64_t)i, room,
                           &table, &token),
                 BN_OK);
        hash = hash * 1000003 + (uint64_t)token;
    }
    return hash;
}

static void test_every_tier_alike(void) {
    const uint32_t vocab = 32000;
    float *logits = malloc(vocab * sizeof *logits);
    void *room = malloc(bn_sample_scratch_size(vocab));
    CHECK(logits != NULL && room != NULL);
    uint64_t r = 11;
    for (uint32_t i = 0; i < vocab; i++)
        logits[i] = 4 * (check_float(&r) + check_float(&r) + check_float(&r));
    const uint64_t expected = fingerprint("scalar", logits, vocab, room);
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++)
        CHECK_MSG(fingerprint(bn_isa_name(i), logits, vocab, room) == expected, "tier %s",
                  bn_isa_name(i));
    free(room);
    free(logits);
}

int main(void) {
    bn_kernels_scalar(&kernels);
    scratch = malloc(bn_sample_scratch_size(MAX_VOCAB));
    CHECK(scratch != NULL);
    test_against_reference();
    test_greedy();
    test_zero_is_off();
    test_banned();
    test_ties();
    test_penalties();
    test_refusals();
    test_every_tier_alike();
    free(scratch);
    return 0;
}
