/* SPDX-License-Identifier: MIT
 *
 * head.h: logits = head(norm(x)), and their log probabilities.
 */
#ifndef BITNET_HEAD_H
#define BITNET_HEAD_H

#include "model.h"
#include "stack.h"
#include "workspace.h"

/* Normalize and quantize rows [0, rows) of x for the head. BN_ERR_NUMERIC if a row is not
 * finite. */
bn_status bn_head_input(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows);

/* Logits of rows [0, rows) after bn_forward: out is [rows][V]. Fails like it. */
bn_status bn_head(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows,
                  float *out);

/* log Σ exp(logits), the sum in double; log softmax(logits)[token]. */
double bn_log_sum(const bn_kernels *k, const float *logits, size_t V);
float bn_log_probability(const bn_kernels *k, const float *logits, size_t V, int32_t token);

#endif
