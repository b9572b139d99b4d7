/* SPDX-License-Identifier: MIT
 *
 * pass.h: rows on their way through a stack, and the steps that its layers consist of. A step
 * processes all rows of the pass with all threads that it has (forward.h), but few rows are
 * normalized and quantized by the caller alone, because waking the others costs more.
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
    const bn_model *m; /* for its kernels */
    const bn_stack *stack;
    bn_workspace *w;
    size_t first, rows;     /* in the workspace */
    int32_t alone;          /* 1: all rows belong to one token, and are treated like a single row */
    atomic_int not_finite;  /* 1: a row is not finite */
    const atomic_int *stop; /* or NULL; not 0: skip the rest */
} bn_pass;

/* q = quantize(norm(x)), the input of `linear`, which may have an additional norm of its own. */
void bn_quantize_x(bn_pass *p, const bn_norm *norm, const bn_tensor *linear);

/* The same for h[0..width). */
void bn_quantize_h(bn_pass *p, const bn_norm *norm, size_t width, const bn_tensor *linear);

/* Products of norm(x); those with norms of their own are computed one after the other. */
void bn_project(bn_pass *p, const bn_norm *norm, const bn_product *products, int n);

/* x += after(W·q), where W is `linear`; with residual_norm x = after(x + W·q). */
void bn_add(bn_pass *p, const bn_tensor *linear, const bn_norm *after);

/* --- for further steps --- */

/* Whether the caller alone computes what takes no products of matrices: for so few rows it takes
 * less time than waking the other threads and fetching what they have written. */
int bn_runs_alone(const bn_pass *p);

/* Run a task whose items are the rows of the pass, counted from 0, and which
 * multiplies no matrix. */
void bn_each_row(const bn_pass *p, bn_task task, void *context);

/* y = norm(x) for some rows; a row that is not finite fails the pass. */
void bn_norm_checked(bn_pass *p, const bn_norm *norm, float *y, size_t y_stride, const float *x,
                     size_t x_stride, size_t n, size_t rows);

/* Whether the input of `linear` must be kept in h for each row, because something multiplies or
 * normalizes it. Otherwise h of a task's first row is scratch for all of them, which stays in the
 * cache. */
int bn_keeps_h(const bn_pass *p, const bn_tensor *linear);

/* q = quantize(norm(from[0..width))) for n rows of the workspace, starting at `row`. */
void bn_quantize_rows(bn_pass *p, size_t row, size_t n, const bn_norm *norm, const float *from,
                      size_t stride, size_t width, const bn_tensor *linear);

/* x += after(y), or with residual_norm x = after(x + y), for n rows of the workspace; y is
 * overwritten. */
void bn_sum_rows(bn_pass *p, const bn_norm *after, size_t row, size_t n);

void bn_fail_pass(bn_pass *p); /* a row is not finite */

#endif
