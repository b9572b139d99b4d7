/* SPDX-License-Identifier: MIT
 *
 * training.c: see training.h.
 */
#include "../training_loops.h"

const bn_training_kernels bn_scalar_training = BN_TRAINING_KERNELS;
