/* SPDX-License-Identifier: MIT
 *
 * leave.h: the output vectors of a stack, through the projector if it has one.
 */
#ifndef BITNET_LEAVE_H
#define BITNET_LEAVE_H

#include "model.h"
#include "workspace.h"

/* h = norm(x) for rows [0, rows), at most w->batch. BN_ERR_NUMERIC if a row is not finite. */
bn_status bn_leave_states(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows);

/* out[rows][bn_width] = projector · h, or h. All threads. BN_ERR_NUMERIC if a result is not finite.
 */
bn_status bn_leave(const bn_stack *stack, const bn_workspace *w, size_t rows, float *out);

/* out[n] = v, scaled to Euclidean length 1; out may be v. BN_ERR_NUMERIC if its length is not
 * finite. */
bn_status bn_leave_unit(const bn_kernels *kernels, float *out, const float *v, size_t n);

#endif
