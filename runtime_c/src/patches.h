/* SPDX-License-Identifier: MIT
 *
 * patches.h: how images enter a stack: x = patch · pixels + bias, of each patch.
 */
#ifndef BITNET_PATCHES_H
#define BITNET_PATCHES_H

struct bn_pass;

/* x of the rows that are patches, from normalized pixels. All threads. */
void bn_patches(struct bn_pass *p);

#endif
