/* SPDX-License-Identifier: MIT
 *
 * training.h: runs the kernels of kernels/training.h for a trainer, in the threads that it has: a
 * pool of our own would take turns with them.
 */
#ifndef BITNET_TRAINING_H
#define BITNET_TRAINING_H

#include "kernels/training.h"

/* cffi-begin: what the Python module has, besides kernels/training.h */

/* Calls work(data) in as many threads, the caller included, and returns when all have returned: the
 * ABI of GOMP_parallel. */
typedef void bn_team(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* The kernels of tier `isa`, or of the best that runs here if NULL, and the product for `linear`,
 * NULL where a trainer's own int8 product is as fast. Returns 0, leaving both unchanged, if that
 * tier does not run here. */
int bn_training_select(bn_training_kernels *table, bn_train_product **product, const char *isa);

/* kernel(args, ...) of `rows` rows, by the caller alone if `threads` is 1 or team is NULL. */
void bn_training_run(bn_train_kernel *kernel, const void *args, size_t rows, bn_team *team,
                     unsigned threads);

/* cffi-end */

#endif
