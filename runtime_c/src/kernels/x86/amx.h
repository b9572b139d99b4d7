/* SPDX-License-Identifier: MIT
 *
 * amx.h: the products of AVX-512-VNNI that AMX leaves few tokens to.
 */
#ifndef BITNET_X86_AMX_H
#define BITNET_X86_AMX_H

#include "../kernels.h"

extern const bn_product_kernels bn_avx512vnni; /* others are NULL */

#endif
