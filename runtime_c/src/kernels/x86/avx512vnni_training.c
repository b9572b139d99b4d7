/* SPDX-License-Identifier: MIT
 *
 * avx512vnni_training.c: training.h for AVX-512.
 */
#include "../kernels.h"

#if defined(__AVX512F__)
#include "../training_loops.h"

const bn_training_kernels bn_avx512vnni_training = BN_TRAINING_KERNELS;
#endif
