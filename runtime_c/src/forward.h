/* SPDX-License-Identifier: MIT
 *
 * forward.h: rows of tokens through all layers of a stack.
 */
#ifndef BITNET_FORWARD_H
#define BITNET_FORWARD_H

#include "model.h"
#include "stack.h"
#include "workspace.h"

/* Run rows [0, rows) of the workspace through all layers; w->x holds the result and the caches
 * the rows' keys and values. Returns BN_ERR_NUMERIC when a row is not finite. */
bn_status bn_forward(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows);

/* x[0..D) = row `token` of the embedding, times the embedding scale. */
void bn_embed(const bn_model *m, const bn_stack *stack, int32_t token, float *x);

#endif
