/* SPDX-License-Identifier: MIT
 *
 * screen.h: the logits that matter to the choice of a token, by a sketch of the head.
 */
#ifndef BITNET_SCREEN_H
#define BITNET_SCREEN_H

#include "model.h"
#include "stack.h"
#include "workspace.h"

enum { BN_SCREEN_MOST = 256 }; /* tokens that bn_head_top can be asked for */

/* The k largest of V numbers that are not below `least`, falling, of equal ones the first first,
 * into top[0..k). Returns how many there are. */
size_t bn_largest(const bn_kernels *kernels, const float *x, size_t V, size_t k, float least,
                  uint32_t *top);

/* Whether the head has a sketch, and nothing is added to its logits: what the next two ask for. */
int bn_head_screens(const bn_stack *stack);

/* Logits of rows [first, first + rows) as the sketch has them, after bn_head_input: [rows][V], of
 * tokens [0, width) and maybe of a few more. */
void bn_head_estimate(const bn_model *m, const bn_stack *stack, const bn_workspace *w, size_t first,
                      size_t rows, size_t width, float *logits);

/* Of row 0, after bn_head_input: in the place of the estimates, exactly, the k largest logits, all
 * that are at most `span` below the k-th of those that `more` has not, those of the n tokens in
 * `more`, and maybe others. listed: [V], of the tokens whose they are, rising. Returns how many.
 * k >= 1, k + n <= BN_SCREEN_MOST, span >= 0. */
size_t bn_head_top(const bn_model *m, const bn_stack *stack, const bn_workspace *w, size_t k,
                   float span, const int32_t *more, size_t n, float *logits, uint32_t *listed);

#endif
