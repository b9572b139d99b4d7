/* SPDX-License-Identifier: MIT
 *
 * leave.h: how vectors leave a stack: through the projector, if it has one.
 */
#ifndef BITNET_LEAVE_H
#define BITNET_LEAVE_H

#include "model.h"
#include "workspace.h"

/* h = norm(x) of rows [0, rows), at most w->batch. BN_ERR_NUMERIC when one is not finite. */
bn_status bn_leave_states(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows);

/* out[rows][bn_width] = projector · h, or h. All threads. BN_ERR_NUMERIC when that is not finite.
 */
bn_status bn_leave(const bn_stack *stack, const bn_workspace *w, size_t rows, float *out);

/* out[n] = v, of Euclidean length 1; out may be v. BN_ERR_NUMERIC when it has none. */
bn_status bn_leave_unit(const bn_kernels *kernels, float *out, const float *v, size_t n);

#endif
