/* SPDX-License-Identifier: MIT
 *
 * choose.c: see choose.h.
 */
#include "choose.h"

#include "adjust.h"
#include "head.h"
#include "kernels/elementary.h"
#include "linear/rows.h"
#include "logits.h"
#include "sampler.h"
#include "screen.h"
#include "turn.h"

/* Tokens whose logits the sampler changes, into more[0..BN_SCREEN_MOST). Returns how many, or -1 if
 * there are too many or one is invalid. */
static int32_t adjusted_tokens(const bn_prediction *of, const bn_sampler *sampler, int32_t *more) {
    int32_t window = sampler->penalty_window;
    window = !bn_has_penalties(sampler)            ? 0
             : window < 0 || window > of->position ? of->position
                                                   : window;
    if (sampler->n_bias < 0 || sampler->n_bias > BN_SCREEN_MOST - 1 ||
        window > BN_SCREEN_MOST - 1 - sampler->n_bias || (sampler->n_bias && !sampler->bias_tokens))
        return -1;
    for (int32_t i = 0; i < sampler->n_bias; i++) {
        more[i] = sampler->bias_tokens[i];
        if (more[i] < 0 || (uint32_t)more[i] >= of->stack->config.vocab_size)
            return -1;
    }
    int32_t n = sampler->n_bias;
    for (int32_t i = of->position - window; i < of->position; i++)
        if (of->tokens[i] != BN_NO_TOKEN)
            more[n++] = of->tokens[i];
    return n;
}

/* The allowed tokens of a row of bn_sampler.allowed, if there are at most BN_SCREEN_MOST. Returns
 * how many, or -1. */
static int32_t few_allowed(const uint32_t *row, uint32_t vocab, uint32_t *tokens) {
    int32_t n = row ? 0 : -1;
    for (uint32_t token = 0; row && token < vocab; token += row[token / 32] ? 1 : 32) {
        if (!bn_allows(row, token))
            continue;
        if (n == BN_SCREEN_MOST)
            return -1;
        tokens[n++] = token;
    }
    return n;
}

/* Which logits of a row a sampler needs. Returns 0 if it needs all of them: when top_p applies
 * without top_k, or for very many tokens. changed: [BN_SCREEN_MOST] */
static int wants(const bn_prediction *of, const bn_sampler *p, bn_wanted *wanted, bn_draw *draw,
                 int32_t *changed) {
    const int of_all = p->temperature > 0 && p->top_k < 1;
    const int32_t k = p->temperature > 0 && p->top_k > 0 ? p->top_k : 1;
    const int32_t n = adjusted_tokens(of, p, changed);
    const float least = 1e-6f;  /* smallest min_p for which weights stay clear of where bn_exp is
                                 * cut off */
    const float margin = 1e-3f; /* exceeds all rounding errors of a weight, as a logarithm */
    if ((of_all && (p->top_p < 1 || (p->min_p > 0 && p->min_p < least))) || n < 0 ||
        k > BN_SCREEN_MOST - n)
        return 0;
    *draw = (bn_draw){p->temperature, of->seed, (uint32_t)of->position};
    *wanted = (bn_wanted){.k = (size_t)k, .changed = changed, .n = (size_t)n};
    if (of_all && p->min_p > 0)
        wanted->span = p->temperature * (margin - (float)bn_log((double)p->min_p));
    else if (of_all)
        wanted->draw = draw;
    return 1;
}

static bn_status all_logits(const bn_prediction *of, bn_workspace *w, bn_choices *logits) {
    *logits = (bn_choices){.x = of->logits, .n = of->stack->config.vocab_size};
    return bn_full_logits(of, w);
}

/* Logits that suffice for this sampler: all of them, or those that can be chosen (screen.c). */
static bn_status sampler_logits(const bn_prediction *of, bn_workspace *w, const bn_sampler *sampler,
                                bn_choices *logits) {
    const bn_sampler p = bn_sampler_or_neutral(sampler);
    const uint32_t V = of->stack->config.vocab_size;
    int32_t changed[BN_SCREEN_MOST];
    bn_wanted wanted;
    bn_draw draw;
    if (*of->ready == BN_READY_LOGITS || !bn_head_screens(of->stack))
        return all_logits(of, w, logits);
    const int32_t few = few_allowed(p.allowed, V, of->listed);
    if (few < 0 && !wants(of, &p, &wanted, &draw, changed))
        return all_logits(of, w, logits);
    *logits = (bn_choices){.x = of->logits, .tokens = of->listed};
    bn_load_hidden(of, w);
    const bn_status status = bn_head_input(of->model, of->stack, w, 1);
    if (!status && few >= 0) {
        logits->n = (uint32_t)few;
        bn_linear_int8_rows(&w->in, &of->stack->head, of->listed, logits->n, of->logits);
    } else if (!status) {
        if (*of->ready != BN_READY_ESTIMATES)
            bn_head_estimate(of->model, of->stack, w, 1, V, of->logits);
        /* so that none of them raises the bar */
        bn_drop_forbidden(&p, &(bn_choices){.n = V}, of->logits);
        logits->n =
            (uint32_t)bn_head_wanted(of->model, of->stack, w, &wanted, of->logits, of->listed);
    }
    *of->ready = BN_READY_HIDDEN;
    return status;
}

bn_status bn_choose(const bn_prediction *of, bn_workspace *w, const bn_sampler *sampler,
                    int32_t *token, float *logit) {
    bn_choices logits;
    bn_status status = sampler_logits(of, w, sampler, &logits);
    if (!status)
        status = bn_sample(sampler, &logits, of->stack->config.vocab_size, of->tokens, of->position,
                           of->seed, of->sampler_scratch, &of->model->kernels, token);
    if (!status && logit)
        *logit = logits.x[bn_place_of(&logits, (uint32_t)*token)];
    return status;
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
    const bn_prediction of = bn_prediction_of(s);
    if (s->ready == BN_READY_LOGITS)
        return bn_choose(&of, NULL, sampler, token, NULL);
    const bn_status status = bn_choose(&of, bn_turn_begin(s->model), sampler, token, NULL);
    bn_turn_end(s->model);
    return status;
}
