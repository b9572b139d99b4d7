/* SPDX-License-Identifier: MIT
 *
 * adjust.c: see adjust.h.
 */
#include "adjust.h"

#include <math.h>

uint32_t bn_place_of(const bn_choices *of, uint32_t token) {
    if (!of->tokens)
        return token < of->n ? token : of->n;
    uint32_t first = 0, end = of->n;
    while (first < end) {
        const uint32_t middle = first + (end - first) / 2;
        if (of->tokens[middle] < token)
            first = middle + 1;
        else
            end = middle;
    }
    return first < of->n && of->tokens[first] == token ? first : of->n;
}

int bn_has_penalties(const bn_sampler *s) {
    return s->penalty_window != 0 &&
           (s->repeat_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0);
}

static void apply_bias(const bn_sampler *s, const bn_choices *of, float *x) {
    for (int32_t i = 0; i < s->n_bias; i++) {
        const uint32_t at = bn_place_of(of, (uint32_t)s->bias_tokens[i]);
        if (at < of->n)
            x[at] += s->bias_values[i];
    }
}

/* Only the counts of tokens in the window are used, so only these are cleared. */
static bn_status apply_penalties(const bn_sampler *s, const bn_choices *of, float *x,
                                 uint32_t *counts, uint32_t vocab, const int32_t *tokens,
                                 int32_t n) {
    if (s->penalty_window >= 0 && n > s->penalty_window) {
        tokens += n - s->penalty_window;
        n = s->penalty_window;
    }
    for (int32_t i = 0; i < n; i++) {
        if (tokens[i] == BN_NO_TOKEN)
            continue;
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= vocab)
            return BN_ERR_TOKEN;
        counts[tokens[i]] = 0;
    }
    for (int32_t i = 0; i < n; i++)
        if (tokens[i] != BN_NO_TOKEN)
            counts[tokens[i]]++;
    for (int32_t i = 0; i < n; i++) {
        const int32_t token = tokens[i];
        if (token == BN_NO_TOKEN || counts[token] == 0) /* already handled */
            continue;
        const uint32_t at = bn_place_of(of, (uint32_t)token);
        if (at < of->n) {
            x[at] = x[at] > 0 ? x[at] / s->repeat_penalty : x[at] * s->repeat_penalty;
            x[at] -= s->presence_penalty + s->frequency_penalty * (float)counts[token];
        }
        counts[token] = 0;
    }
    return BN_OK;
}

void bn_drop_forbidden(const bn_sampler *s, const bn_choices *of, float *x) {
    for (uint32_t i = 0; s->allowed && i < of->n; i++)
        if (!bn_allows(s->allowed, bn_token_at(of, i)))
            x[i] = -INFINITY;
}

int bn_adjusts(const bn_sampler *s) {
    return s->n_bias > 0 || bn_has_penalties(s) || s->allowed;
}

bn_status bn_adjust(const bn_sampler *s, const bn_choices *of, float *x, uint32_t *counts,
                    uint32_t vocab, const int32_t *tokens, int32_t n) {
    bn_status status = BN_OK;
    apply_bias(s, of, x);
    if (bn_has_penalties(s))
        status = apply_penalties(s, of, x, counts, vocab, tokens, n);
    bn_drop_forbidden(s, of, x);
    return status;
}
