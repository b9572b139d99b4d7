/* SPDX-License-Identifier: MIT
 *
 * together.h: append a token to each of several texts.
 */
#ifndef BITNET_TOGETHER_H
#define BITNET_TOGETHER_H

#include "bitnet_runtime.h"
#include "check.h"

/* Append in one pass. A next token is chosen and dropped, so that there are logits. Returns the
 * first status that is not BN_OK. */
static inline bn_status append_together(bn_session *const *sessions, const int32_t *tokens,
                                        int32_t n) {
    enum { MOST = 16 };
    bn_entry entries[MOST];
    int32_t chosen[MOST];
    CHECK(n <= MOST);
    for (int32_t i = 0; i < n; i++)
        entries[i] = (bn_entry){.session = sessions[i],
                                .tokens = &tokens[i],
                                .n_tokens = 1,
                                .most = 1,
                                .chosen = &chosen[i]};
    return bn_step_batch(entries, n);
}

#endif
