/* SPDX-License-Identifier: MIT
 *
 * amx.h: the AVX-512-VNNI kernels that AMX uses for few tokens or queries.
 */
#ifndef BITNET_X86_AMX_H
#define BITNET_X86_AMX_H

#include "../kernels.h"

extern const bn_product_kernels bn_avx512vnni; /* unused entries are NULL */
extern const bn_attention_kernels bn_avx512vnni_int8;

#endif
