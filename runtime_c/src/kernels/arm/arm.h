/* SPDX-License-Identifier: MIT
 *
 * arm.h: shared by the ARM kernels. Each tier's file includes it and compiles it with its own
 * flags.
 */
#ifndef BITNET_ARM_ARM_H
#define BITNET_ARM_ARM_H

#include <arm_neon.h>
#include <string.h>

#include "../inline.h"
#include "../kernels.h"

typedef int32x4_t dot_fn(int32x4_t sum, int8x16_t a, int8x16_t b);

/* Hides the value of a register from the compiler. */
#define KEEP(v) __asm__ volatile("" : "+w"(v))

/* Broadcasts four dimensions of a query to all keys, or four weights to all dimensions. */
INLINE int8x16_t four_of(const int8_t *q) {
    int8x16_t x = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(const void *)q));
    KEEP(x); /* see BROADCAST in neon.c */
    return x;
}

INLINE void ternary_fields_of(int8x16_t field[4], uint8x16_t v) {
    const uint8x16_t mask = vdupq_n_u8(3);
    field[0] = vreinterpretq_s8_u8(vandq_u8(v, mask));
    field[1] = vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(v, 2), mask));
    field[2] = vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(v, 4), mask));
    field[3] = vreinterpretq_s8_u8(vshrq_n_u8(v, 6));
}

/* A tile is four 16-byte groups of 4 rows; field f holds the codes of columns 4f to 4f + 3. */
INLINE void ternary_fields(int8x16_t field[4], const uint8_t *group) {
    ternary_fields_of(field, vld1q_u8(group));
}

static inline void clear(const bn_matmul *m) {
    for (size_t t = 0; t < m->tokens; t++)
        memset(m->acc + t * m->acc_stride, 0, m->panels * BN_PANEL * sizeof *m->acc);
}

/* Fill in entries other than integer products: neon_float.c, neon_scale.c and neon_attention.c. */
void bn_kernels_neon_float(bn_kernels *table);
void bn_kernels_neon_scale(bn_kernels *table);
void bn_neon_scale_sums(const bn_scaling *a);
void bn_kernels_neon_attention(bn_kernels *table);

#endif
