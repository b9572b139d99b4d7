/* SPDX-License-Identifier: MIT
 *
 * screen.h: the logits that matter to the choice of a token, by a sketch of the head.
 */
#ifndef BITNET_SCREEN_H
#define BITNET_SCREEN_H

#include "model.h"
#include "stack.h"
#include "workspace.h"

enum { BN_SCREEN_MOST = 256 }; /* tokens that bn_head_wanted can be asked for */

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

/* How a token is drawn of all: sampler.h, rules 2 and 4. temperature > 0. */
typedef struct bn_draw {
    float temperature;
    uint64_t seed;
    uint32_t position;
} bn_draw;

/* Which logits a choice needs. Those of `changed`, n tokens, will not stay what they are; "largest"
 * and "first" leave them out. */
typedef struct bn_wanted {
    size_t k;            /* the k largest, k >= 1, k + n <= BN_SCREEN_MOST; */
    float span;          /* all that are at most so far below the k-th, >= 0; */
    const bn_draw *draw; /* those which may come first in a draw, or NULL; */
    const int32_t *changed;
    size_t n;
} bn_wanted;

/* Of row 0, after bn_head_input: in the place of the estimates, exactly, the logits that are wanted
 * and maybe others. listed: [V], of the tokens whose they are, rising. Returns how many. */
size_t bn_head_wanted(const bn_model *m, const bn_stack *stack, const bn_workspace *w,
                      const bn_wanted *wanted, float *logits, uint32_t *listed);

#endif
