/* SPDX-License-Identifier: MIT
 *
 * mixture.h: mixture of experts: several feed-forward networks, of which each row uses some.
 *
 *     x += post_norm( Σ share · expert( norm(x) ))     in the order of shares, largest first
 *
 * A row routed to k experts has k slots: rows of a separate workspace, sorted by expert, so that
 * each expert processes its rows together and experts without rows are not read.
 */
#ifndef BITNET_MIXTURE_H
#define BITNET_MIXTURE_H

#include "network.h"

/* Slots processed at a time, more if one row needs more. They take memory, but the more there are,
 * the more rows share one read of an expert. */
enum { BN_SLOTS = 4096 };

/* Rows that go through a mixture at a time, at most `batch`; experts that they can use. */
static inline size_t bn_mixture_rows(const bn_config *c, size_t batch) {
    const size_t most = BN_SLOTS / c->experts_per_token;
    return most == 0 ? 1 : bn_min(most, batch);
}

static inline size_t bn_mixture_experts(const bn_config *c, size_t rows) {
    return bn_min(rows * c->experts_per_token, c->n_experts);
}

void bn_mixture(struct bn_pass *p, const bn_ffn *ffn);

#endif
