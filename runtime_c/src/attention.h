/* SPDX-License-Identifier: MIT
 *
 * attention.h: attention of the rows of a pass to the keys and values they see.
 */
#ifndef BITNET_ATTENTION_H
#define BITNET_ATTENTION_H

#include "cache.h"

struct bn_pass;

/* h[b] = softmax(q·Kᵀ·scale)·V over the keys that row b sees. All threads. */
void bn_attention(struct bn_pass *p, const bn_layer *l);

/* Floats of a thread's share of workspace.attend. */
size_t bn_attend_floats(const bn_config *c);
/* Floats of workspace.partial. */
size_t bn_partial_floats(const bn_config *c, size_t n_ctx);

#endif
