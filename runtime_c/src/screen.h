/* SPDX-License-Identifier: MIT
 *
 * screen.h: finds the logits that can affect the choice of a token, by a sketch of the head.
 */
#ifndef BITNET_SCREEN_H
#define BITNET_SCREEN_H

#include "model.h"
#include "stack.h"
#include "workspace.h"

enum { BN_SCREEN_MOST = 256 }; /* most tokens for bn_head_wanted */

/* The k largest of V numbers that are not below `least`, in descending order, ties by index, into
 * top[0..k). Returns how many there are. */
size_t bn_largest(const bn_kernels *kernels, const float *x, size_t V, size_t k, float least,
                  uint32_t *top);

/* Whether the head has a sketch, and no bias or soft-cap: required by the next two functions. */
int bn_head_screens(const bn_stack *stack);

/* Estimates of the logits of rows [0, rows) from the sketch, after bn_head_input: [rows][V], of
 * tokens [0, width) and possibly a few more. */
void bn_head_estimate(const bn_model *m, const bn_stack *stack, const bn_workspace *w, size_t rows,
                      size_t width, float *logits);

/* How a token is drawn from all tokens: sampler.h, rules 2 and 4. temperature > 0. */
typedef struct bn_draw {
    float temperature;
    uint64_t seed;
    uint32_t position;
} bn_draw;

/* Which logits a choice needs. Those of the n tokens in `changed` will be modified later; "largest"
 * and "first" exclude them. */
typedef struct bn_wanted {
    size_t k;            /* the k largest, k >= 1, k + n <= BN_SCREEN_MOST; */
    float span;          /* all that are at most this far below the k-th, >= 0; */
    const bn_draw *draw; /* those that may come first in a draw, or NULL; */
    const int32_t *changed;
    size_t n;
} bn_wanted;

/* For row 0, after bn_head_input: compute the wanted logits exactly, possibly with others. Their
 * tokens go to listed[V] in ascending order, and their logits to the same places of `logits`, which
 * held the estimates. Returns how many. */
size_t bn_head_wanted(const bn_model *m, const bn_stack *stack, const bn_workspace *w,
                      const bn_wanted *wanted, float *logits, uint32_t *listed);

#endif
