/* SPDX-License-Identifier: MIT
 *
 * mixture.h: a feed-forward network for each expert, and of these some for each row.
 *
 *     x += post_norm( Σ share · expert( norm(x) ))     in the order of shares, largest first
 *
 * A row that takes k experts has k slots: rows of a workspace of their own, in the order of the
 * experts, so that each expert multiplies its rows together and only those of them that are taken
 * are read.
 */
#ifndef BITNET_MIXTURE_H
#define BITNET_MIXTURE_H

#include "network.h"
#include "workspace.h"

/* Slots that are filled at a time, if a row does not take more. They take memory; but the more of
 * them, the more rows an expert has to share a reading of it. */
enum { BN_SLOTS = 4096 };

/* Scratch for up to `rows` rows. k is how many a row takes, X how many there are. */
typedef struct bn_slots {
    size_t rows;
    float *logits;        /* [rows][X] */
    uint64_t *keys;       /* [threads][X] */
    uint32_t *expert;     /* [rows][k] */
    float *share;         /* [rows][k] */
    uint32_t *slot;       /* [rows][k] the slot of each of them */
    uint32_t *row;        /* [rows·k] whose a slot is */
    uint32_t *network;    /* [rows·k] and of which expert */
    uint32_t *end;        /* [threads][X] behind the slots of each expert */
    size_t taken;         /* most experts of all rows */
    bn_group *groups;     /* [threads][taken] */
    bn_product *products; /* [threads][taken][2] */
    bn_workspace *w;      /* operands, ffn and y of the slots */
} bn_slots;

/* See bn_workspace_part. */
typedef struct bn_part {
    bn_workspace w, of_slots;
    bn_slots slots;
} bn_part;

/* Rows that go through a mixture at a time, of so many; and experts that these take at most. */
static inline size_t bn_mixture_rows(const bn_config *c, size_t batch) {
    const size_t most = BN_SLOTS / c->experts_per_token;
    return most == 0 ? 1 : most < batch ? most : batch;
}

static inline size_t bn_mixture_experts(const bn_config *c, size_t rows) {
    const size_t slots = rows * c->experts_per_token;
    return slots < c->n_experts ? slots : c->n_experts;
}

void bn_mixture(struct bn_pass *p, const bn_ffn *ffn);

#endif
