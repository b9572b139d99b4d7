/* SPDX-License-Identifier: MIT
 *
 * images.h: how many images go through the layers together.
 */
#ifndef BITNET_IMAGES_H
#define BITNET_IMAGES_H

#include "stack.h"

/* Of n >= 1 images those of a turn: as many as have 512 rows, which are less where patches are so
 * wide that they would take much memory, and at least 1. */
size_t bn_images_together(const bn_stack *stack, size_t n);

#endif
