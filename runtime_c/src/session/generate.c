/* SPDX-License-Identifier: MIT
 *
 * generate.c: tokens out of a session.
 */
#include <math.h>
#include <string.h>

#include "batch.h"
#include "head.h"
#include "logits.h"
#include "sampler.h"
#include "session.h"
#include "turn.h"

/* Tokens whose logits the sampler changes, into more[0..BN_SCREEN_MOST). Returns how many, or -1
 * when there are too many or one is not a token. */
static int32_t adjusted_tokens(const bn_session *s, const bn_sampler *sampler, int32_t *more) {
    const int penalties = sampler->repeat_penalty != 1 || sampler->presence_penalty != 0 ||
                          sampler->frequency_penalty != 0;
    int32_t window = sampler->penalty_window;
    window = !penalties ? 0 : window < 0 || window > s->position ? s->position : window;
    if (sampler->n_bias < 0 || sampler->n_bias > BN_SCREEN_MOST - 1 ||
        window > BN_SCREEN_MOST - 1 - sampler->n_bias || (sampler->n_bias && !sampler->bias_tokens))
        return -1;
    for (int32_t i = 0; i < sampler->n_bias; i++) {
        more[i] = sampler->bias_tokens[i];
        if (more[i] < 0 || (uint32_t)more[i] >= s->stack->config.vocab_size)
            return -1;
    }
    int32_t n = sampler->n_bias;
    for (int32_t i = s->position - window; i < s->position; i++)
        if (s->tokens[i] != BN_NO_TOKEN)
            more[n++] = s->tokens[i];
    return n;
}

/* The tokens of a row of bn_sampler.allowed, if there are at most BN_SCREEN_MOST. Returns how many,
 * or -1. */
static int32_t few_allowed(const uint32_t *row, uint32_t vocab, int32_t *tokens) {
    int32_t n = row ? 0 : -1;
    for (uint32_t token = 0; row && token < vocab; token += row[token / 32] ? 1 : 32) {
        if (!bn_allows(row, token))
            continue;
        if (n == BN_SCREEN_MOST)
            return -1;
        tokens[n++] = (int32_t)token;
    }
    return n;
}

/* Estimates become -INFINITY where a token is not allowed, so that none of those sets a bar. */
static void drop_forbidden(float *logits, const uint32_t *row, uint32_t vocab) {
    for (uint32_t token = 0; row && token < vocab; token++)
        if (!bn_allows(row, token))
            logits[token] = -INFINITY;
}

/* Logits good enough for this sampler: all of them, or exact where it can look (head.c). */
static bn_status sampler_logits(bn_session *s, bn_workspace *w, const bn_sampler *sampler) {
    const bn_sampler p = bn_sampler_or_neutral(sampler);
    const int32_t k = p.temperature == 0 ? 1 : p.top_k;
    const uint32_t V = s->stack->config.vocab_size;
    int32_t tokens[BN_SCREEN_MOST], n = -1;
    if (s->ready == BN_READY_LOGITS || !bn_head_screens(s->stack))
        return bn_full_logits(s, w);
    const int32_t few = few_allowed(p.allowed, V, tokens);
    if (few < 0 && (k < 1 || (n = adjusted_tokens(s, &p, tokens)) < 0 || k > BN_SCREEN_MOST - n))
        return bn_full_logits(s, w);
    bn_load_hidden(s, w);
    const bn_status status = bn_head_input(s->model, s->stack, w, 0, 1);
    if (!status && few >= 0) {
        bn_head_of(s->stack, w, tokens, (size_t)few, s->logits);
    } else if (!status) {
        if (s->ready != BN_READY_ESTIMATES)
            bn_head_estimate(s->model, s->stack, w, 0, 1, s->logits);
        drop_forbidden(s->logits, p.allowed, V);
        bn_head_top(s->model, s->stack, w, (size_t)k, tokens, (size_t)n, s->logits, w->screened);
    }
    s->ready = BN_READY_HIDDEN;
    return status;
}

static bn_status choose(bn_session *s, const bn_sampler *sampler, int32_t *token) {
    return bn_sample(sampler, s->logits, s->stack->config.vocab_size, s->tokens, s->position,
                     s->seed, s->sampler_scratch, &s->model->kernels, token);
}

bn_status bn_session_sample(bn_session *s, const bn_sampler *sampler, int32_t *token) {
    BN_STANDARD_FLOATS;
    if (!s || !token)
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    if (bn_check_follows(s))
        return BN_ERR_MASK;
    if (s->ready == BN_READY_NOTHING)
        return BN_ERR_STATE;
    if (s->ready != BN_READY_LOGITS) {
        const bn_status status = sampler_logits(s, bn_turn_begin(s->model), sampler);
        bn_turn_end(s->model);
        if (status)
            return status;
    }
    return choose(s, sampler, token);
}

/* For the i-th token that a call chooses. */
static bn_sampler nth(const bn_sampler *sampler, size_t i, uint32_t vocab) {
    bn_sampler s = bn_sampler_or_neutral(sampler);
    if (s.allowed)
        s.allowed += i * ((vocab + 31) / 32);
    return s;
}

/* Whether sampling gives this token too. If not, the next step goes on from here. */
static int agrees(const bn_batch *b, size_t row, const bn_sampler *sampler, int32_t expected) {
    bn_session *s = b->w->rows[row].session;
    const bn_sampler next = nth(sampler, row + 1, s->stack->config.vocab_size);
    int32_t token;
    if (!bn_session_cancelled(s) && !sampler_logits(s, b->w, &next) && !choose(s, &next, &token) &&
        token == expected)
        return 1;
    bn_batch_take(b, row);
    return 0;
}

/* Append a token and the draft behind it, then keep what sampling agrees with. */
static bn_status verify_draft(bn_session *s, const bn_sampler *sampler, int32_t token,
                              const int32_t *draft, int32_t n_draft, int32_t *tokens, int32_t *n) {
    const int32_t start = s->position;
    bn_status status = bn_check_tokens(s, draft, n_draft);
    if (status)
        return status;
    s->ready = BN_READY_NOTHING;
    bn_batch b = bn_batch_begin(s);
    for (int32_t i = 0; i <= n_draft; i++)
        bn_batch_add(&b, s, i > 0 ? draft[i - 1] : token, BN_WANT_SCORES);
    status = bn_batch_run(&b);
    s->position = start;
    for (int32_t i = 0; i <= n_draft && !status; i++) {
        s->position = start + i + 1;
        bn_batch_take(&b, (size_t)i);
        tokens[i] = s->tokens[start + i];
        *n = i + 1;
        if (i == n_draft || !agrees(&b, (size_t)i, sampler, draft[i]))
            break;
    }
    bn_batch_end(&b);
    return status;
}

bn_status bn_session_step(bn_session *s, const bn_sampler *sampler, const int32_t *draft,
                          int32_t n_draft, int32_t *tokens, int32_t *n) {
    BN_STANDARD_FLOATS;
    if (!s || !tokens || !n || n_draft < 0 || (n_draft > 0 && !draft))
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    if (bn_check_follows(s))
        return BN_ERR_MASK;
    const int32_t room = s->n_ctx - s->position;
    if (room < 1)
        return BN_ERR_CONTEXT;
    int32_t token;
    bn_status status = bn_session_sample(s, sampler, &token);
    if (status)
        return status;
    int32_t k = n_draft > 0 && token == draft[0] ? n_draft - 1 : 0;
    const int32_t most = (int32_t)bn_score_rows(s->stack, (size_t)s->batch);
    k = k < most ? k : most - 1;
    k = k < room ? k : room - 1;
    if (k > 0 && bn_session_reserve(s, k + 1))
        k = 0; /* one may fit */
    if (k > 0)
        return verify_draft(s, sampler, token, draft + 1, k, tokens, n);
    status = bn_session_append(s, &token, 1, BN_LOGITS_LAST, NULL);
    if (!status)
        *tokens = token, *n = 1;
    return status;
}
