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

/* Run rows [0, rows) of the workspace, at most w->room, through all layers; w->x holds the result
 * and the caches the rows' keys and values. BN_ERR_NUMERIC when a row is not finite;
 * BN_ERR_CANCELLED when `stop`, looked at before each piece of a layer unless it is NULL, is not 0.
 */
bn_status bn_forward(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows,
                     const atomic_int *stop);

/* Only what the caches get of the rows, which leaves out most of the last layer: of rows that
 * nothing is wanted of. What w->x holds then is of no use. */
bn_status bn_forward_keys(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows);

/* A step of all rows, of as many at a time as there is scratch memory for: each piece is a pass of
 * its own, whose row 0 is the first of its rows. If there are many, each thread has pieces of its
 * own, and shares of the scratch memory: then no thread waits for another within a step, nor for
 * what lies in the other's cache. If there are few, all threads do one piece. */
typedef void bn_step(bn_pass *p, const bn_layer *l);
void bn_each_piece(bn_pass *p, const bn_layer *l, bn_step *step);

/* x[0..D) = row `token` of the embedding, times the embedding scale. */
void bn_embed(const bn_model *m, const bn_stack *stack, int32_t token, float *x);

#endif
