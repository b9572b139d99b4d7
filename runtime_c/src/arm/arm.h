/* SPDX-License-Identifier: MIT
 *
 * arm.h: what the ARM kernels share. Each tier's file includes it with its own flags.
 */
#ifndef BITNET_ARM_ARM_H
#define BITNET_ARM_ARM_H

#include <arm_neon.h>
#include <string.h>

#include "../kernels.h"

/* Loops over registers have constant bounds and must disappear, or the registers become memory. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define INLINE static inline __attribute__((always_inline))

/* The compiler may assume nothing about the value of a register. */
#define KEEP(v) __asm__ volatile("" : "+w"(v))

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

/* Both planes put together: u - 128, so that a code is one signed byte. Turning bit 7 of u over
 * in the high plane does both halves of a byte at once, and shifting one plane into the other
 * needs no mask. The caller adds 128·Σq. */
INLINE void int8_fields(int8x16_t field[2], const uint8_t *high, const uint8_t *low) {
    const uint8x16_t h = veorq_u8(vld1q_u8(high), vdupq_n_u8(0x88)), l = vld1q_u8(low);
    field[0] = vreinterpretq_s8_u8(vsliq_n_u8(l, h, 4));
    field[1] = vreinterpretq_s8_u8(vsriq_n_u8(h, l, 4));
}

static inline void clear(const bn_matmul *m) {
    for (size_t t = 0; t < m->tokens; t++)
        memset(m->acc + t * m->acc_stride, 0, m->panels * BN_PANEL * sizeof *m->acc);
}

/* Add offset·Σq to the sums of all rows of a token: codes were multiplied that much too small. */
static inline void add_offset(const bn_matmul *m, size_t tile_k, int32_t offset) {
    const size_t k = m->k_tiles * tile_k;
    for (size_t t = 0; t < m->tokens; t++) {
        int32_t sum = 0;
        for (size_t i = 0; i < k; i++)
            sum += m->q[t * m->q_stride + i];
        for (size_t r = 0; r < m->panels * BN_PANEL; r++)
            m->acc[t * m->acc_stride + r] += offset * sum;
    }
}

/* Every entry of the table that is not an integer product: kernels_neon_float.c and
 * kernels_neon_attention.c. */
void bn_kernels_neon_float(bn_kernels *table);
void bn_kernels_neon_attention(bn_kernels *table);

#endif
