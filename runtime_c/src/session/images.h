/* SPDX-License-Identifier: MIT
 *
 * images.h: how many images go through the layers together.
 */
#ifndef BITNET_IMAGES_H
#define BITNET_IMAGES_H

#include "stack.h"

/* How many of n >= 1 images form a turn: as many as fit 512 rows, fewer if their patches are so
 * wide that they would take much memory, and at least 1. */
size_t bn_images_together(const bn_stack *stack, size_t n);

#endif
