/* SPDX-License-Identifier: MIT
 *
 * leave.c: see leave.h.
 */
#include "leave.h"

#include <math.h>
#include <string.h>

#include "linear/values.h"
#include "pass.h"

static void norm_rows(void *context, int32_t thread, size_t first, size_t end) {
    bn_pass *p = context;
    const size_t D = p->stack->config.dim;
    const bn_workspace *w = p->w;
    (void)thread;
    for (size_t row = first; row < end; row++)
        if (!bn_norm_row(&p->m->kernels, &p->stack->final_norm, w->in.h + row * w->in.wide,
                         w->x + row * bn_row_stride(D), D))
            bn_fail_pass(p);
}

bn_status bn_leave_states(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows) {
    bn_pass p = {.m = m, .stack = stack, .w = w, .rows = rows};
    bn_each_row(&p, norm_rows, &p);
    return p.not_finite ? BN_ERR_NUMERIC : BN_OK;
}

bn_status bn_leave(const bn_stack *stack, const bn_workspace *w, size_t rows, float *out) {
    const size_t width = bn_width(&stack->config);
    const bn_product product = {.w = &stack->projector, .y = out, .y_stride = width};
    if (stack->projector.data)
        bn_linear(&w->in, 0, rows, &product, 1);
    else
        for (size_t row = 0; row < rows; row++)
            memcpy(out + row * width, w->in.h + row * w->in.wide, width * sizeof *out);
    return bn_has_not_finite_f32((const uint8_t *)out, rows * width * sizeof *out) ? BN_ERR_NUMERIC
                                                                                   : BN_OK;
}

bn_status bn_leave_unit(const bn_kernels *kernels, float *out, const float *v, size_t n) {
    float squares;
    kernels->products.f32_matmul(&squares, 1, v, 1, n, v, n, 1);
    if (!isfinite(squares))
        return BN_ERR_NUMERIC;
    const float length = fmaxf(sqrtf(squares), 1e-12f);
    for (size_t i = 0; i < n; i++)
        out[i] = v[i] / length;
    return BN_OK;
}
