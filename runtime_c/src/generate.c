/* SPDX-License-Identifier: MIT
 *
 * generate.c: tokens into a session, logits and tokens out of it.
 */
#include <math.h>
#include <string.h>

#include "internal.h"
#include "sampler.h"

/* --- tokens in --- */

bn_status bn_check_tokens(const bn_session *s, const int32_t *tokens, int32_t n) {
    if (!s || !tokens || n < 1)
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    if (n > s->n_ctx - s->position)
        return BN_ERR_CONTEXT;
    for (int32_t i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= s->model->config.vocab_size)
            return BN_ERR_TOKEN;
    return BN_OK;
}

/* Run the next n <= batch tokens through the layers; the session then holds them. */
static bn_status forward_block(bn_session *s, const int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        s->work.rows[i] = (bn_row){&s->cache, tokens[i], s->position + i};
    const bn_status status = bn_forward(s->model, &s->work, (size_t)n);
    if (status)
        return status;
    memcpy(s->tokens + s->position, tokens, (size_t)n * sizeof *tokens);
    s->position += n;
    return BN_OK;
}

typedef bn_status (*block_done)(bn_session *s, int32_t start, int32_t n, int32_t total,
                                void *context);

/* Cut n tokens into blocks; call done after each, with the workspace still holding its rows. */
static bn_status run_blocks(bn_session *s, const int32_t *tokens, int32_t n, block_done done,
                            void *context) {
    bn_status status = BN_OK;
    s->ready = BN_READY_NOTHING;
    for (int32_t i = 0, block; i < n && !status; i += block) {
        bn_pool_lock(s->model->pool); /* a block is a turn: nobody waits for a whole prompt */
        block = n - i < (int32_t)s->work.batch ? n - i : (int32_t)s->work.batch;
        status = bn_session_cancelled(s) ? BN_ERR_CANCELLED : forward_block(s, tokens + i, block);
        if (!status)
            status = done(s, i, block, n, context);
        bn_pool_unlock(s->model->pool);
    }
    return status;
}

/* A row of the workspace of `from` becomes the session's; its logits wait until they are asked for.
 */
static void keep_hidden(bn_session *s, const bn_session *from, size_t row) {
    const size_t D = s->model->config.dim;
    memcpy(s->hidden, from->work.x + row * D, D * sizeof *s->hidden);
    s->ready = BN_READY_HIDDEN;
}

static bn_status append_done(bn_session *s, int32_t start, int32_t n, int32_t total,
                             void *context) {
    float *out = context; /* rows of logits for every token, or NULL */
    if (start + n == total)
        keep_hidden(s, s, (size_t)n - 1);
    if (!out)
        return BN_OK;
    return bn_head(s->model, &s->work, 0, (size_t)n,
                   out + (size_t)start * s->model->config.vocab_size);
}

bn_status bn_session_append(bn_session *s, const int32_t *tokens, int32_t n, bn_logits logits,
                            float *out) {
    BN_STANDARD_FLOATS;
    bn_status status = bn_check_tokens(s, tokens, n);
    if (status)
        return status;
    if (logits != BN_LOGITS_NONE && logits != BN_LOGITS_LAST && logits != BN_LOGITS_ALL)
        return BN_ERR_ARGUMENT;
    if (logits != BN_LOGITS_NONE && !s->model->config.has_head)
        return BN_ERR_NO_HEAD;
    status = run_blocks(s, tokens, n, append_done, logits == BN_LOGITS_ALL ? out : NULL);
    if (status || logits == BN_LOGITS_NONE) {
        s->ready = BN_READY_NOTHING;
    } else if (logits == BN_LOGITS_LAST && out) {
        const float *row = bn_session_logits(s);
        if (!row)
            return BN_ERR_NUMERIC;
        memcpy(out, row, s->model->config.vocab_size * sizeof *out);
    }
    return status;
}

/* score_logits of the first rows of the workspace: estimates, if the sampler can do with them. */
static bn_status score_first_rows(bn_session *s, size_t rows) {
    if (!bn_head_screens(s->model))
        return bn_head(s->model, &s->work, 0, rows, s->score_logits);
    const bn_status status = bn_head_input(s->model, &s->work, 0, rows);
    if (!status)
        bn_head_estimate(s->model, &s->work, rows, s->score_logits);
    return status;
}

/* The same, with what score_first_rows made of its logits. */
static void take_row(bn_session *s, const bn_session *from, size_t row) {
    const size_t V = s->model->config.vocab_size;
    keep_hidden(s, from, row);
    memcpy(s->logits, from->score_logits + row * V, V * sizeof *s->logits);
    s->ready = bn_head_screens(s->model) ? BN_READY_ESTIMATES : BN_READY_LOGITS;
}

bn_status bn_append_batch(bn_session *const *sessions, const int32_t *tokens, int32_t n) {
    BN_STANDARD_FLOATS;
    if (!sessions || n < 1)
        return BN_ERR_ARGUMENT;
    for (int32_t i = 0; i < n; i++) {
        const bn_status status = bn_check_tokens(sessions[i], tokens ? tokens + i : NULL, 1);
        if (status)
            return status;
        if (!sessions[i]->model->config.has_head)
            return BN_ERR_NO_HEAD;
        for (int32_t j = 0; j < i; j++)
            if (sessions[j] == sessions[i] || sessions[j]->model != sessions[i]->model)
                return BN_ERR_ARGUMENT;
    }
    bn_model *m = sessions[0]->model;
    bn_workspace *w = &sessions[0]->work;
    const int32_t most = sessions[0]->score_rows;
    bn_status status = BN_OK;
    bn_pool_lock(m->pool);
    for (int32_t i = 0, rows; i < n && !status; i += rows) {
        rows = n - i < most ? n - i : most;
        for (int32_t r = 0; r < rows; r++)
            w->rows[r] =
                (bn_row){&sessions[i + r]->cache, tokens[i + r], sessions[i + r]->position};
        status = bn_forward(m, w, (size_t)rows);
        if (!status)
            status = score_first_rows(sessions[0], (size_t)rows);
        for (int32_t r = 0; r < rows && !status; r++) {
            bn_session *s = sessions[i + r];
            s->tokens[s->position++] = tokens[i + r];
            take_row(s, sessions[0], (size_t)r);
        }
    }
    bn_pool_unlock(m->pool);
    return status;
}

/* --- logits and probabilities out --- */

static bn_status full_logits(bn_session *s) {
    bn_status status = BN_OK;
    if (s->ready != BN_READY_LOGITS) {
        bn_pool_lock(s->model->pool);
        memcpy(s->work.x, s->hidden, s->model->config.dim * sizeof *s->hidden);
        status = bn_head(s->model, &s->work, 0, 1, s->logits);
        bn_pool_unlock(s->model->pool);
        if (!status)
            s->ready = BN_READY_LOGITS;
    }
    return status;
}

const float *bn_session_logits(bn_session *s) {
    BN_STANDARD_FLOATS;
    if (!s || s->ready == BN_READY_NOTHING || full_logits(s))
        return NULL;
    return s->logits;
}

/* log softmax(logits)[token]; the sum in double, in pieces that fit the stack. */
static float log_probability(const bn_kernels *k, const float *logits, size_t V, int32_t token) {
    const float top = k->vectors.max(logits, V);
    double sum = 0;
    float piece[256];
    for (size_t i = 0; i < V; i += 256) {
        const size_t n = V - i < 256 ? V - i : 256;
        memcpy(piece, logits + i, n * sizeof *piece);
        sum += (double)k->vectors.exp_sum(piece, n, top);
    }
    return (float)((double)logits[token] - (double)top - bn_log(sum));
}

typedef struct score_context {
    const int32_t *tokens;
    float *out;
} score_context;

static bn_status score_done(bn_session *s, int32_t start, int32_t n, int32_t total, void *context) {
    const score_context *c = context;
    const size_t V = s->model->config.vocab_size;
    for (int32_t i = 0, rows; i < n; i += rows) {
        rows = n - i < s->score_rows ? n - i : s->score_rows;
        const bn_status status =
            bn_head(s->model, &s->work, (size_t)i, (size_t)rows, s->score_logits);
        if (status)
            return status;
        for (int32_t r = 0; r < rows && start + i + r + 1 < total; r++)
            c->out[start + i + r + 1] =
                log_probability(&s->model->kernels, s->score_logits + (size_t)r * V, V,
                                c->tokens[start + i + r + 1]);
    }
    keep_hidden(s, s, (size_t)n - 1);
    return BN_OK;
}

bn_status bn_session_score(bn_session *s, const int32_t *tokens, int32_t n, float *out) {
    BN_STANDARD_FLOATS;
    const bn_status status = bn_check_tokens(s, tokens, n);
    if (status)
        return status;
    if (!out)
        return BN_ERR_ARGUMENT;
    if (!s->model->config.has_head)
        return BN_ERR_NO_HEAD;
    out[0] = NAN;
    if (s->position > 0) {
        const float *row = bn_session_logits(s);
        if (!row)
            return BN_ERR_STATE;
        out[0] = log_probability(&s->model->kernels, row, s->model->config.vocab_size, tokens[0]);
    }
    score_context context = {tokens, out};
    return run_blocks(s, tokens, n, score_done, &context);
}

/* --- tokens out --- */

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
        if (more[i] < 0 || (uint32_t)more[i] >= s->model->config.vocab_size)
            return -1;
    }
    memcpy(more + sampler->n_bias, s->tokens + s->position - window, (size_t)window * sizeof *more);
    return sampler->n_bias + window;
}

/* Logits good enough for this sampler: all of them, or exact where it can look (head.c). */
static bn_status sampler_logits(bn_session *s, const bn_sampler *sampler) {
    const bn_config *c = &s->model->config;
    const bn_sampler p = bn_sampler_or_neutral(sampler);
    const int32_t k = p.temperature == 0 ? 1 : p.top_k;
    int32_t more[BN_SCREEN_MOST], n;
    if (s->ready == BN_READY_LOGITS || !bn_head_screens(s->model) || k < 1 ||
        (n = adjusted_tokens(s, &p, more)) < 0 || k > BN_SCREEN_MOST - n)
        return full_logits(s);
    bn_pool_lock(s->model->pool);
    memcpy(s->work.x, s->hidden, c->dim * sizeof *s->hidden);
    const bn_status status = bn_head_input(s->model, &s->work, 0, 1);
    if (!status && s->ready != BN_READY_ESTIMATES)
        bn_head_estimate(s->model, &s->work, 1, s->logits);
    if (!status)
        bn_head_top(s->model, &s->work, (size_t)k, more, (size_t)n, s->logits, s->screened);
    bn_pool_unlock(s->model->pool);
    s->ready = BN_READY_HIDDEN;
    return status;
}

bn_status bn_session_sample(bn_session *s, const bn_sampler *sampler, int32_t *token) {
    BN_STANDARD_FLOATS;
    if (!s || !token)
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    if (s->ready == BN_READY_NOTHING)
        return BN_ERR_STATE;
    const bn_status status = sampler_logits(s, sampler);
    if (status)
        return status;
    return bn_sample(sampler, s->logits, s->model->config.vocab_size, s->tokens, s->position,
                     &s->rng, s->sampler_scratch, &s->model->kernels, token);
}

/* Append tokens[0] and the draft behind it, then keep what sampling agrees with. */
static bn_status verify_draft(bn_session *s, const bn_sampler *sampler, const int32_t *draft,
                              int32_t n_draft, int32_t *tokens, int32_t *n) {
    const int32_t start = s->position;
    memcpy(tokens + 1, draft, (size_t)n_draft * sizeof *draft);
    bn_status status = bn_check_tokens(s, tokens, n_draft + 1);
    if (status)
        return status;
    s->ready = BN_READY_NOTHING;
    bn_pool_lock(s->model->pool);
    status = forward_block(s, tokens, n_draft + 1);
    if (!status)
        status = score_first_rows(s, (size_t)n_draft + 1);
    bn_pool_unlock(s->model->pool);
    if (status) {
        s->position = start;
        return status;
    }
    for (*n = 1;; ++*n) {
        s->position = start + *n;
        take_row(s, s, (size_t)*n - 1);
        if (*n > n_draft)
            return BN_OK;
        const uint64_t rng = s->rng;
        int32_t token;
        if (bn_session_sample(s, sampler, &token) || token != tokens[*n]) {
            s->rng = rng; /* the next step draws again, from the same state */
            take_row(s, s, (size_t)*n - 1);
            return BN_OK;
        }
    }
}

bn_status bn_session_step(bn_session *s, const bn_sampler *sampler, const int32_t *draft,
                          int32_t n_draft, int32_t *tokens, int32_t *n) {
    BN_STANDARD_FLOATS;
    if (!s || !tokens || !n || n_draft < 0 || (n_draft > 0 && !draft))
        return BN_ERR_ARGUMENT;
    if (bn_session_cancelled(s))
        return BN_ERR_CANCELLED;
    const int32_t room = s->n_ctx - s->position;
    if (room < 1)
        return BN_ERR_CONTEXT;
    const uint64_t rng = s->rng;
    bn_status status = bn_session_sample(s, sampler, tokens);
    if (status)
        return status;
    int32_t k = n_draft > 0 && tokens[0] == draft[0] ? n_draft - 1 : 0;
    k = k < s->score_rows ? k : s->score_rows - 1;
    k = k < room ? k : room - 1;
    *n = 1;
    status = k > 0 ? verify_draft(s, sampler, draft + 1, k, tokens, n)
                   : bn_session_append(s, tokens, 1, BN_LOGITS_LAST, NULL);
    if (status)
        s->rng = rng;
    return status;
}
