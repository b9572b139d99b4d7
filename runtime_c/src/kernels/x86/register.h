/* SPDX-License-Identifier: MIT
 *
 * register.h: a tier's vector register under names common to all tiers: bytes (four columns of each
 * row), sums (a 32-bit sum per row), vec (floats), shorts, quads. A tier with 512-bit registers
 * defines REGISTER_BITS as 512 before it includes a header.
 */
#ifndef BITNET_X86_REGISTER_H
#define BITNET_X86_REGISTER_H

#ifndef REGISTER_BITS
#define REGISTER_BITS 256
#endif

#if REGISTER_BITS == 512
#include "zmm.h"
#else
#include "ymm.h"
#endif

/* Most queries that share loaded keys. */
enum { QK_MANY = REGISTERS == 32 ? 8 : 4 };

#endif
