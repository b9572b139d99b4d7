/* SPDX-License-Identifier: MIT
 *
 * pass.h: rows on their way through a stack, and the steps that its layers are made of. A step does
 * all rows of the pass and uses all threads that these have (forward.h); but one row is normed and
 * quantized by the caller alone, because waking the others costs more.
 */
#ifndef BITNET_PASS_H
#define BITNET_PASS_H

#include <stdatomic.h>

#include "linear/linear.h"
#include "model.h"
#include "norm.h"
#include "stack.h"
#include "system/threads.h"
#include "workspace.h"

typedef struct bn_pass {
    const bn_model *m; /* kernels */
    const bn_stack *stack;
    bn_workspace *w;
    size_t first, rows;     /* of the workspace */
    int32_t alone;          /* the rows are those of one token: as one row */
    atomic_int not_finite;  /* 1: a row is not */
    const atomic_int *stop; /* or NULL; not 0: the rest need not be done */
} bn_pass;

/* q = quantize(norm(x)), the input of `linear`, which may have one more norm of its own. */
void bn_quantize_x(bn_pass *p, const bn_norm *norm, const bn_tensor *linear);

/* q = quantize(norm(h[0..width))), the same. */
void bn_quantize_h(bn_pass *p, const bn_norm *norm, size_t width, const bn_tensor *linear);

/* Products of norm(x). Those with a norm of their own before them take turns. */
void bn_project(bn_pass *p, const bn_norm *norm, const bn_product *products, int n);

/* x += after(W·q), W being `linear`; with residual_norm x = after(x + W·q). */
void bn_add(bn_pass *p, const bn_tensor *linear, const bn_norm *after);

/* --- for one more such step --- */

/* Items of the task are the rows of the pass, the first being 0. */
void bn_each_row(const bn_pass *p, bn_task task, void *context);

/* y = norm(x) of some rows; one that is not finite fails the pass. */
void bn_norm_checked(bn_pass *p, const bn_norm *norm, float *y, size_t y_stride, const float *x,
                     size_t x_stride, size_t n, size_t rows);

/* Whether what is quantized for `linear` has to be in h as well, because something multiplies or
 * norms that; else h of the first row of a task is scratch for all, which stays in the cache. */
int bn_keeps_h(const bn_pass *p, const bn_tensor *linear);

/* q = quantize(norm(from[0..width))) of n rows of the workspace, `row` the first. */
void bn_quantize_rows(bn_pass *p, size_t row, size_t n, const bn_norm *norm, const float *from,
                      size_t stride, size_t width, const bn_tensor *linear);

/* x += after(y), or with residual_norm x = after(x + y), of n rows of the workspace; y is lost. */
void bn_sum_rows(bn_pass *p, const bn_norm *after, size_t row, size_t n);

void bn_fail_pass(bn_pass *p); /* a row is not finite */

#endif
