/* SPDX-License-Identifier: MIT
 *
 * scaled.h: ternary_scaled out of a tier's own ternary_matmul and scale_sums.
 *
 * Included by a tier's file, and so compiled with its flags.
 */
#ifndef BITNET_SCALED_H
#define BITNET_SCALED_H

#include "kernels.h"

static inline void scaled_by(const bn_matmul *m, const bn_scaling *a,
                             void (*matmul)(const bn_matmul *), void (*scale)(const bn_scaling *)) {
    matmul(m);
    for (size_t t = 0; t < m->tokens; t++)
        scale(&a[t]);
}

#endif
