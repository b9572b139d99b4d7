/* SPDX-License-Identifier: MIT
 *
 * patches.h: patch embedding of images: x = patch · pixels + bias for each patch.
 */
#ifndef BITNET_PATCHES_H
#define BITNET_PATCHES_H

struct bn_pass;

/* Compute x of the rows that are patches, from normalized pixels. All threads. */
void bn_patches(struct bn_pass *p);

#endif
