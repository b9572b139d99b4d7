/* SPDX-License-Identifier: MIT
 *
 * avx2_training.c: training.h for AVX2.
 */
#include "../kernels.h"

#if defined(__AVX2__)
#include "../training_loops.h"

const bn_training_kernels bn_avx2_training = BN_TRAINING_KERNELS;
#endif
