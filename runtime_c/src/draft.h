/* SPDX-License-Identifier: MIT
 *
 * draft.h: the draft stack, which guesses tokens for the text stack before it (FORMAT.md §2).
 *
 *     x = projection · [ hidden_norm(state of token i); row_norm(row of token i + 1) ]
 *     then its layers, its final norm, and the text stack's head
 *
 * Its keys and values are additional layers of the text's cache; its row for tokens i and i + 1 is
 * at position i. So copying, saving or cutting a cache includes the draft's.
 */
#ifndef BITNET_DRAFT_H
#define BITNET_DRAFT_H

#include "stack.h"

enum { BN_DRAFT_WINDOW = 1024 }; /* window of the draft's layers, in positions */

struct bn_pass;

/* Read stack `index` of the file as the draft of `text`. Fails with BN_ERR_MEMORY,
 * BN_ERR_UNSUPPORTED, and BN_ERR_CONFIG if the two do not match. */
bn_status bn_draft_open(const bn_file *file, uint32_t index, const bn_kernels *kernels,
                        bn_stack *text, char *detail);

/* Compute x of the rows from their states and the embeddings of their tokens. */
void bn_draft_enter(struct bn_pass *p);

#endif
