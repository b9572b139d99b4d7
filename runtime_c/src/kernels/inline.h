/* SPDX-License-Identifier: MIT
 *
 * inline.h: inner loops are written once with sizes as arguments; INLINE and UNROLL turn every size
 * into straight-line code. Loops over registers have constant bounds and must disappear, or the
 * registers become memory.
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
