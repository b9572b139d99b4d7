/* SPDX-License-Identifier: MIT
 *
 * sampler.c: bn_sample (sampler.h), step by step in the order given there.
 *
 * Fast at 128,256 tokens: a small top_k is one pass that skips nearly every block of logits;
 * without top_k, a bound first drops what top_p and min_p cannot keep; the rest is sorted in linear
 * time, so that flat distributions are not slow.
 */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "adjust.h"
#include "kernels/elementary.h"
#include "screen.h"

typedef struct candidate {
    float logit;
    int32_t token;
} candidate;

typedef struct scratch {
    candidate *candidates; /* [vocab] */
    candidate *spare;      /* [vocab] for sorting */
    float *weights;        /* [vocab] */
    float *logits;         /* [vocab] after bias and penalties */
    uint32_t *counts;      /* [vocab] shares the memory of weights, which come later */
} scratch;

size_t bn_sample_scratch_size(uint32_t vocab) {
    return vocab * (2 * sizeof(candidate) + 2 * sizeof(float));
}

static scratch divide_scratch(void *memory, uint32_t vocab) {
    candidate *candidates = memory;
    float *weights = (float *)(candidates + 2 * (size_t)vocab);
    return (scratch){candidates, candidates + vocab, weights, weights + vocab, (uint32_t *)weights};
}

/* --- Arguments --- */

bn_sampler bn_sampler_or_neutral(const bn_sampler *sampler) {
    bn_sampler s = sampler != NULL ? *sampler : (bn_sampler){0};
    s.top_p = s.top_p == 0 ? 1 : s.top_p;
    s.repeat_penalty = s.repeat_penalty == 0 ? 1 : s.repeat_penalty;
    return s;
}

bn_status bn_check_sampler(const bn_sampler *sampler, uint32_t vocab) {
    const bn_sampler given = bn_sampler_or_neutral(sampler), *s = &given;
    /* Written so that NaN fails each test. */
    const int valid = s->temperature >= 0 && s->temperature < INFINITY && s->top_k >= 0 &&
                      s->top_p > 0 && s->top_p <= 1 && s->min_p >= 0 && s->min_p <= 1 &&
                      s->repeat_penalty > 0 && s->repeat_penalty < INFINITY &&
                      isfinite(s->presence_penalty) && isfinite(s->frequency_penalty) &&
                      s->penalty_window >= -1 && s->n_bias >= 0;
    if (!valid)
        return BN_ERR_ARGUMENT;
    if (s->n_bias > 0 && (s->bias_tokens == NULL || s->bias_values == NULL))
        return BN_ERR_ARGUMENT;
    for (int32_t i = 0; i < s->n_bias; i++) {
        if (s->bias_tokens[i] < 0 || (uint32_t)s->bias_tokens[i] >= vocab)
            return BN_ERR_ARGUMENT;
        if (!(s->bias_values[i] < INFINITY))
            return BN_ERR_ARGUMENT;
    }
    return BN_OK;
}

/* --- Order --- */

/* Increases as the logit decreases. Adding zero makes -0 equal 0. */
static uint32_t sort_key(float logit) {
    uint32_t bits;
    logit += 0.0f;
    memcpy(&bits, &logit, sizeof bits);
    return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}

/* Sort by descending logit. The radix sort is stable, so equal candidates stay in ascending order
 * of id. */
static void sort(candidate *c, size_t n, candidate *spare) {
    for (int shift = 0; shift < 32; shift += 8) {
        size_t place[256] = {0}, sum = 0;
        for (size_t i = 0; i < n; i++)
            place[sort_key(c[i].logit) >> shift & 255]++;
        for (int digit = 0; digit < 256; digit++) {
            const size_t count = place[digit];
            place[digit] = sum;
            sum += count;
        }
        for (size_t i = 0; i < n; i++)
            spare[place[sort_key(c[i].logit) >> shift & 255]++] = c[i];
        candidate *swapped = c; /* four times, so the result ends in the original array */
        c = spare;
        spare = swapped;
    }
}

/* --- Candidates --- */

enum { BLOCK = 1024 };

static size_t take_all(candidate *c, const bn_choices *of) {
    size_t n = 0;
    for (uint32_t i = 0; i < of->n; i++)
        if (of->x[i] > -INFINITY)
            c[n++] = (candidate){of->x[i], (int32_t)bn_token_at(of, i)};
    return n;
}

enum { SMALL = 256 }; /* candidates up to which insertion is faster than sorting all */

/* The k largest, sorted; k <= SMALL. */
static size_t take_top(candidate *c, size_t k, const bn_choices *of, const bn_kernels *kernels) {
    uint32_t top[SMALL];
    const size_t n = bn_largest(kernels, of->x, of->n, k, -FLT_MAX, top);
    for (size_t i = 0; i < n; i++)
        c[i] = (candidate){of->x[top[i]], (int32_t)bn_token_at(of, top[i])};
    return n;
}

/* weights[i] = exp((logit of candidate i - best) / temperature); returns their sum. */
static double weigh(float *weights, const candidate *c, size_t n, float best, float temperature,
                    const bn_kernels *kernels) {
    for (size_t i = 0; i < n; i++)
        weights[i] = (c[i].logit - best) / temperature;
    return kernels->vectors.exp_sum(weights, n, 0);
}

/* Drop candidates lighter than `bound`, keeping the order. */
static size_t drop_below(candidate *c, const float *weights, size_t n, double bound) {
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (weights[i] >= bound)
            c[kept++] = c[i];
    return kept;
}

/* The number of sorted candidates that top_p and then min_p keep; at least 1. */
static size_t cut(const float *weights, size_t n, double total, float top_p, float min_p) {
    double sum = 0;
    size_t kept = n;
    for (size_t i = 0; top_p < 1 && i < n; i++) {
        sum += weights[i];
        if (sum >= top_p * total) {
            kept = i + 1;
            break;
        }
    }
    while (kept > 1 && weights[kept - 1] < min_p)
        kept--;
    return kept;
}

/* --- Draw --- */

enum { NOISE_BLOCK = 256 }; /* candidates whose noise is computed at once */

static void noise_of(double *u, const candidate *c, size_t n, const bn_draw *draw,
                     const bn_kernels *kernels) {
    uint32_t tokens[NOISE_BLOCK];
    for (size_t i = 0; i < n; i++)
        tokens[i] = (uint32_t)c[i].token;
    kernels->vectors.noise(u, tokens, n, draw->seed, draw->position);
}

/* The candidate that arrives first: rule 4 of sampler.h. As 1 - u <= -ln u, few logarithms have to
 * be computed. */
static int32_t first_to_come(const candidate *c, const float *weights, size_t n,
                             const bn_draw *draw, const bn_kernels *kernels) {
    double u[NOISE_BLOCK], soonest = INFINITY;
    int32_t token = INT32_MAX;
    for (size_t i = 0; i < n; i++) {
        if (i % NOISE_BLOCK == 0)
            noise_of(u, c + i, bn_min(n - i, NOISE_BLOCK), draw, kernels);
        const double w = (double)weights[i];
        if (1 - u[i % NOISE_BLOCK] > soonest * w)
            continue;
        const double wait = -bn_log(u[i % NOISE_BLOCK]) / w;
        if (wait < soonest || (wait == soonest && c[i].token < token)) {
            soonest = wait;
            token = c[i].token;
        }
    }
    return token;
}

static int32_t sample(const bn_sampler *s, const bn_choices *of, uint32_t vocab, float best,
                      scratch room, const bn_draw *draw, const bn_kernels *kernels) {
    candidate *c = room.candidates;
    float *w = room.weights;
    const size_t k = s->top_k > 0 && (uint32_t)s->top_k < vocab ? (size_t)s->top_k : vocab;
    size_t n;
    if (k <= SMALL && k < vocab) {
        n = take_top(c, k, of, kernels);
    } else {
        n = take_all(c, of);
        if (k < vocab)
            sort(c, n, room.spare);
        n = bn_min(n, k);
    }
    const double total = weigh(w, c, n, best, draw->temperature, kernels);
    if (k == vocab && (s->top_p < 1 || s->min_p > 0)) {
        /* All candidates lighter than (1 - top_p) · total / n sum to less than 1 - top_p, so the
         * others include all that top_p keeps. Halved for safety against rounding. */
        const double tail = (1 - (double)s->top_p) * total / (double)n / 2;
        n = drop_below(c, w, n, tail > s->min_p ? tail : s->min_p);
        sort(c, n, room.spare);
        weigh(w, c, n, best, draw->temperature, kernels);
    }
    n = cut(w, n, total, s->top_p, s->min_p);
    return first_to_come(c, w, n, draw, kernels);
}

/* The first token with the largest logit, or -1 if a logit is NaN. */
static int32_t first_of(const bn_choices *of, float best, const bn_kernels *kernels) {
    uint32_t list[BLOCK];
    int32_t found = -1;
    for (uint32_t first = 0; first < of->n; first += BLOCK) {
        const uint32_t block = of->n - first < BLOCK ? of->n - first : BLOCK;
        const size_t n = kernels->vectors.reaching(list, of->x + first, best, block);
        for (size_t i = 0; i < n; i++)
            if (isnan(of->x[first + list[i]]))
                return -1;
        if (n > 0 && found < 0)
            found = (int32_t)bn_token_at(of, first + list[0]);
    }
    return found;
}

bn_status bn_sample(const bn_sampler *sampler, const bn_choices *logits, uint32_t vocab,
                    const int32_t *tokens, int32_t n_tokens, uint64_t seed, void *memory,
                    const bn_kernels *kernels, int32_t *token) {
    const bn_sampler given = bn_sampler_or_neutral(sampler), *s = &given;
    if (vocab < 1 || vocab > INT32_MAX || n_tokens < 0 || (n_tokens > 0 && tokens == NULL))
        return BN_ERR_ARGUMENT;
    bn_status status = bn_check_sampler(sampler, vocab);
    if (status != BN_OK)
        return status;

    const scratch room = divide_scratch(memory, vocab);
    bn_choices of = *logits;
    if (bn_adjusts(s)) {
        memcpy(room.logits, logits->x, logits->n * sizeof *logits->x);
        of.x = room.logits;
        status = bn_adjust(s, &of, room.logits, room.counts, vocab, tokens, n_tokens);
        if (status != BN_OK)
            return status;
    }

    const float best = of.n > 0 ? kernels->vectors.max(of.x, of.n) : -INFINITY;
    const int32_t first = first_of(&of, best, kernels);
    if (first < 0 || !isfinite(best))
        return BN_ERR_NUMERIC;
    const bn_draw draw = {s->temperature, seed, (uint32_t)n_tokens};
    *token = s->temperature == 0 ? first : sample(s, &of, vocab, best, room, &draw, kernels);
    return BN_OK;
}
