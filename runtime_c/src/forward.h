/* SPDX-License-Identifier: MIT
 *
 * forward.h: rows of tokens through all layers of a stack.
 */
#ifndef BITNET_FORWARD_H
#define BITNET_FORWARD_H

#include "model.h"
#include "pass.h"
#include "stack.h"
#include "workspace.h"

/* Run rows [0, rows) of the workspace, at most w->room, through all layers; w->x then holds the
 * result and the caches the rows' keys and values. BN_ERR_NUMERIC if a row is not finite;
 * BN_ERR_CANCELLED if `stop`, which is checked before each piece of a layer, is not 0; it may be
 * NULL. */
bn_status bn_forward(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows,
                     const atomic_int *stop);

/* Compute only the keys and values of the rows, which skips most of the last layer: for rows whose
 * output is not needed. Leaves w->x undefined. */
bn_status bn_forward_keys(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows);

/* Run a step for all rows, as many at a time as there is scratch memory for: each piece is a pass
 * of its own, whose row 0 is its first row. If there are many rows, each thread runs its own pieces
 * in its share of the scratch memory, so that no thread waits for another within a step, nor for
 * data in another's cache. If there are few, all threads share each piece. */
typedef void bn_step(bn_pass *p, const bn_layer *l);
void bn_each_piece(bn_pass *p, const bn_layer *l, bn_step *step);

/* x[0..D) = row `token` of the embedding, times the embedding scale. */
void bn_embed(const bn_model *m, const bn_stack *stack, int32_t token, float *x);

#endif
