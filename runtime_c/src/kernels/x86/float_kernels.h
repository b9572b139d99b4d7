/* SPDX-License-Identifier: MIT
 *
 * float_kernels.h: all float kernels, which the x86 tiers share, and set_float_kernels, which
 * enters them in a tier's table.
 */
#ifndef BITNET_X86_FLOAT_KERNELS_H
#define BITNET_X86_FLOAT_KERNELS_H

#include "attention.h"
#include "exponential.h"
#include "float_rows.h"
#include "noise.h"
#include "norms.h"
#include "scale.h"
#include "screen.h"

/* qk and pv of quantized caches are set in tier_template.h. */
static void set_float_kernels(bn_kernels *table) {
    table->products.f32_matmul = f32_matmul;
    table->products.f16_matmul = f16_matmul;
    table->products.int8_add_rows = int8_add_rows;
    table->vectors = (bn_vector_kernels){.scale_sums = scale_sums,
                                         .add = add_to,
                                         .quantize = quantize,
                                         .rms_norm = rms_norm,
                                         .layer_norm = layer_norm,
                                         .max = max_of,
                                         .reaching = reaching,
                                         .estimate = estimate,
                                         .may_reach = may_reach,
                                         .noise = noise,
                                         .exp_sum = exp_sum,
                                         .silu_gate = silu_gate,
                                         .relu2_gate = relu2_gate,
                                         .gelu_gate = gelu_gate,
                                         .relu_gate = relu_gate,
                                         .gelu_erf_gate = gelu_erf_gate};
    table->attention[BN_KV_F16] = (bn_attention_kernels){qk_f16, pv_f16, NULL};
    table->attention[BN_KV_F32] = (bn_attention_kernels){qk_f32, pv_f32, NULL};
    table->attention[BN_KV_INT8].weigh = table->attention[BN_KV_K4V8].weigh = weigh;
    table->bytes.f32_to_f16 = f32_to_f16;
    table->bytes.f16_to_f32 = f16_to_f32;
}

#endif
