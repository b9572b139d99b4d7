/* SPDX-License-Identifier: MIT
 *
 * head.c: see head.h.
 */
#include "head.h"

#include <math.h>
#include <string.h>

#include "kernels/elementary.h"
#include "linear/linear.h"
#include "pass.h"

bn_status bn_head_input(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows) {
    bn_pass p = {.m = m, .stack = stack, .w = w, .rows = rows};
    bn_quantize_x(&p, &stack->final_norm, &stack->head);
    return p.not_finite ? BN_ERR_NUMERIC : BN_OK;
}

bn_status bn_head(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows,
                  float *out) {
    const float cap = stack->config.logit_softcap;
    const size_t V = stack->config.vocab_size;
    const bn_status status = bn_head_input(m, stack, w, rows);
    const bn_product logits = {.w = &stack->head, .y = out, .y_stride = V};
    if (status)
        return status;
    bn_linear(&w->in, 0, rows, &logits, 1);
    if (cap > 0)
        for (size_t i = 0; i < rows * V; i++)
            out[i] = bn_soft_cap(out[i], cap);
    return BN_OK;
}

double bn_log_sum(const bn_kernels *k, const float *logits, size_t V) {
    enum { PIECE = 256 };
    const float top = k->vectors.max(logits, V);
    double sum = 0;
    float piece[PIECE];
    for (size_t i = 0; i < V; i += PIECE) {
        const size_t n = bn_min(V - i, PIECE);
        memcpy(piece, logits + i, n * sizeof *piece);
        sum += (double)k->vectors.exp_sum(piece, n, top);
    }
    return isnan(sum) ? sum : (double)top + bn_log(sum); /* a logit is NaN */
}

float bn_log_probability(const bn_kernels *k, const float *logits, size_t V, int32_t token) {
    return (float)((double)logits[token] - bn_log_sum(k, logits, V));
}
