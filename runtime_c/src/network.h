/* SPDX-License-Identifier: MIT
 *
 * network.h: the feed-forward networks of a layer: one for all rows, or one for each expert.
 *
 *     gated   down( sub_norm( act(gate) · up ))
 *     plain   down( sub_norm( act(up) ))
 */
#ifndef BITNET_NETWORK_H
#define BITNET_NETWORK_H

#include "file/file.h"
#include "kernels/kernels.h"
#include "linear/operands.h"
#include "norm.h"
#include "routing.h"

struct bn_pass;

typedef struct bn_network {
    bn_norm sub_norm;
    bn_tensor gate, up, down; /* F × D (gate: or none), F × D, D × F */
} bn_network;

typedef struct bn_ffn {
    uint32_t kind; /* BN_FFN_GATED or BN_FFN_PLAIN */
    bn_norm norm, post_norm;
    bn_gate *act;      /* act(g) · u */
    int32_t rectifies; /* act is 0 where g is not positive */
    bn_choice choice;
    bn_tensor router;           /* experts × D; no data: there is one network, for all rows */
    const bn_network *networks; /* that, or one for each expert */
} bn_ffn;

/* Networks of a layer. */
static inline size_t bn_ffn_networks(const bn_config *c) {
    return c->n_experts > 0 ? c->n_experts : 1;
}

/* networks: [bn_ffn_networks], to be filled in. */
bn_ffn bn_ffn_read(const bn_file *file, uint32_t stack, uint32_t layer, const bn_kernels *kernels,
                   bn_network *networks);

/* That of pooling by attention, which is plain. */
bn_ffn bn_ffn_of_pool(const bn_file *file, uint32_t stack, const bn_kernels *kernels,
                      bn_network *network);

/* Floats of workspace.ffn for up to `batch` rows. */
size_t bn_ffn_floats(const bn_config *c, size_t batch);

/* --- the steps, for rows of which each may have a network of its own --- */

/* What a network computes first, of the rows from `row` on: gate and up, or up. Returns how many.
 */
int bn_ffn_products(const struct bn_pass *p, const bn_ffn *ffn, const bn_network *network,
                    size_t row, bn_product products[2]);

/* h = act(gate) · up or act(up), then as input of down. network: which one is a row's; NULL: the
 * first is. */
void bn_ffn_activate(struct bn_pass *p, const bn_ffn *ffn, const uint32_t *network);

#endif
