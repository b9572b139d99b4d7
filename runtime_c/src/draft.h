/* SPDX-License-Identifier: MIT
 *
 * draft.h: the stack that guesses tokens for the one before it (FORMAT.md §2, a draft).
 *
 *     x = projection · [ hidden_norm(state of token i); row_norm(row of token i + 1) ]
 *     then its layers, its final norm, and the head of the other
 *
 * Its keys and values are layers more of the other's cache, its row of the two tokens at the place
 * of the first. So whoever copies, keeps or cuts a cache does so with that of the draft, too.
 */
#ifndef BITNET_DRAFT_H
#define BITNET_DRAFT_H

#include "stack.h"

enum { BN_DRAFT_WINDOW = 1024 }; /* positions that a row of a draft sees, at most */

struct bn_pass;

/* Read stack `index` of the file as the draft of `text`. Fails with BN_ERR_MEMORY, BN_ERR_CONFIG
 * when they do not go together, and BN_ERR_UNSUPPORTED. */
bn_status bn_draft_open(const bn_file *file, uint32_t index, const bn_kernels *kernels,
                        bn_stack *text, char *detail);

/* x of the rows: of their states, and their tokens' rows of the embedding. */
void bn_draft_enter(struct bn_pass *p);

#endif
