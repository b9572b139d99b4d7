/* SPDX-License-Identifier: MIT
 *
 * amx.h: the AVX-512-VNNI products that AMX uses for few tokens.
 */
#ifndef BITNET_X86_AMX_H
#define BITNET_X86_AMX_H

#include "../kernels.h"

extern const bn_product_kernels bn_avx512vnni; /* unused entries are NULL */

#endif
