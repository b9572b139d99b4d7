/* SPDX-License-Identifier: MIT
 *
 * kernels.h: everything whose speed depends on the instruction set, as four tables by topic.
 *
 * scalar/ fills every entry and is the specification: a SIMD tier overrides the entries it speeds
 * up and must produce the same bits. Kernels take pointers and sizes; they never allocate, lock or
 * log, and know nothing about layers. The caller splits the work among threads.
 *
 * The float rule. A sum over n terms uses 16 lanes: lane j accumulates the terms j, j+16, j+32, ...
 * by fused multiply-add, in that order, starting at +0; missing terms of the last round count as
 * 0·0. The lanes are then reduced by the tree
 *     s[j] += s[j+8] (j<8);  s[j] += s[j+4] (j<4);  s[j] += s[j+2] (j<2);  s[0] + s[1].
 * That is one 512-bit register, two of 256 bits or four of 128. Everything else is elementwise, so
 * any vector width gives the same bits.
 */
#ifndef BITNET_KERNELS_H
#define BITNET_KERNELS_H

#include "../system/floats.h"
#include "attention.h"
#include "bytes.h"
#include "products.h"
#include "training.h"
#include "vectors.h"

typedef struct bn_kernels {
    const char *isa;
    bn_product_kernels products;
    bn_vector_kernels vectors;
    bn_attention_kernels attention[BN_KV_TYPES]; /* by bn_kv_type */
    bn_byte_kernels bytes;
    bn_training_kernels training;
} bn_kernels;

/* Fills *table with the tier `isa` (NULL: the best one this build and CPU support). Returns 0,
 * leaving *table unchanged, if `isa` does not name a tier that runs here. */
int bn_kernels_select(bn_kernels *table, const char *isa);

/* Whether x86 kernels use the memory and register strategies that suit Intel's cores rather than
 * AMD's. Set once, while the library is loaded, before any thread reads it: it is a property of the
 * machine, and kernels, which are inlined into each other, do not know their table. Results are the
 * same bits either way, so tests set it. */
extern int bn_like_intel;

void bn_kernels_scalar(bn_kernels *table);

/* One filler per ISA file: overrides entries in *table and returns 1, or returns 0 when the file
 * was compiled without the ISA's flags. Called only on a CPU that supports it. */
int bn_kernels_avx2(bn_kernels *table);       /* AVX2, FMA, F16C, PCLMULQDQ */
int bn_kernels_avxvnni(bn_kernels *table);    /* the above and AVX-VNNI */
int bn_kernels_avx512vnni(bn_kernels *table); /* AVX-512 F, BW, DQ, VL, VNNI */
int bn_kernels_amx(bn_kernels *table);        /* the above, AMX-TILE and AMX-INT8 */
int bn_kernels_neon(bn_kernels *table);       /* AArch64, CRC32 */
int bn_kernels_dotprod(bn_kernels *table);    /* the above and the Armv8.2 dot product */
int bn_kernels_i8mm(bn_kernels *table);       /* the above and the Armv8.6 int8 matrix multiply */

/* Stub for a tier's filler when the file is compiled without its flags. */
#define BN_ABSENT_TIER(filler)                                                                     \
    int filler(bn_kernels *table) {                                                                \
        (void)table;                                                                               \
        return 0;                                                                                  \
    }

#endif
