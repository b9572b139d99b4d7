/* SPDX-License-Identifier: MIT
 *
 * inline.h: inner loops are written once, with sizes as arguments; INLINE and UNROLL specialize
 * them into straight-line code for each size. Loops over arrays of registers have constant bounds
 * and must be fully unrolled, or the registers spill to memory.
 */
#ifndef BITNET_KERNELS_INLINE_H
#define BITNET_KERNELS_INLINE_H

#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#endif
