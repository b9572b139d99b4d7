/* SPDX-License-Identifier: MIT
 *
 * kernels.h: everything whose speed depends on the instruction set, as four tables by topic.
 *
 * scalar/ fills every entry and is the specification: a SIMD tier overrides what it does faster
 * and must give the same bits. Kernels take pointers and sizes; they never allocate, lock, log, or
 * know what a layer is. Whoever calls splits the work among threads.
 *
 * The float rule. A sum over n terms is made of 16 lanes: lane j takes the terms
 * j, j+16, j+32, ... by fused multiply-add, in that order, starting at +0; a
 * missing term of the last round counts as 0·0. Then the tree
 *     s[j] += s[j+8] (j<8);  s[j] += s[j+4] (j<4);  s[j] += s[j+2] (j<2);  s[0] + s[1].
 * That is one 512-bit register, two of 256 bits or four of 128. Everything else
 * is element by element, so any vector width gives the same bits.
 */
#ifndef BITNET_KERNELS_H
#define BITNET_KERNELS_H

#include "../system/floats.h"
#include "attention.h"
#include "bytes.h"
#include "products.h"
#include "vectors.h"

typedef struct bn_kernels {
    const char *isa;
    bn_product_kernels products;
    bn_vector_kernels vectors;
    bn_attention_kernels attention[BN_KV_TYPES]; /* by bn_kv_type */
    bn_byte_kernels bytes;
} bn_kernels;

/* The best table this build and CPU have at or below `isa` (NULL: best). Returns 0 when
 * `isa` names no tier that runs here. */
int bn_kernels_select(bn_kernels *table, const char *isa);

/* Whether x86 kernels go about memory and registers as suits Intel's cores, or AMD's. Tests set it:
 * the bits are the same. */
extern int bn_like_intel;

void bn_kernels_scalar(bn_kernels *table);

/* One filler per ISA file: overrides entries in *table and returns 1, or returns 0 when the
 * file was compiled without the ISA's flags. Called only after the CPU was found to have it. */
int bn_kernels_avx2(bn_kernels *table);       /* AVX2, FMA, F16C, PCLMULQDQ */
int bn_kernels_avxvnni(bn_kernels *table);    /* the above and AVX-VNNI */
int bn_kernels_avx512vnni(bn_kernels *table); /* AVX-512 F, BW, DQ, VL, VNNI */
int bn_kernels_amx(bn_kernels *table);        /* the above and AMX of tiles and int8 */
int bn_kernels_neon(bn_kernels *table);       /* AArch64, CRC32 */
int bn_kernels_dotprod(bn_kernels *table);    /* the above and the Armv8.2 dot product */
int bn_kernels_i8mm(bn_kernels *table);       /* the above and the Armv8.6 int8 matrix multiply */

/* What stands in the place of a tier's filler when its flags are missing. */
#define BN_ABSENT_TIER(filler)                                                                     \
    int filler(bn_kernels *table) {                                                                \
        (void)table;                                                                               \
        return 0;                                                                                  \
    }

#endif
