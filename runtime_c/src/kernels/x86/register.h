/* SPDX-License-Identifier: MIT
 *
 * register.h: the register that a tier computes with, under the same names for every tier: bytes
 * (four columns for each row), sums (a 32-bit sum for each row), vec (floats), shorts. A tier with
 * registers of 512 bits says so before its first header: #define REGISTER_BITS 512.
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

/* Queries of a prompt that share what is loaded of keys. */
enum { QK_MANY = REGISTERS == 32 ? 8 : 4 };

#endif
