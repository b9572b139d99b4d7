/* SPDX-License-Identifier: MIT
 *
 * network.h: the feed-forward networks of a layer: one for all rows, or one per expert.
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
    bn_tensor gate, up, down; /* F × D (optional for gate), F × D, D × F */
} bn_network;

typedef struct bn_ffn {
    uint32_t kind; /* BN_FFN_GATED or BN_FFN_PLAIN */
    bn_norm norm, post_norm;
    bn_gate *act;      /* act(g) · u */
    int32_t rectifies; /* act is 0 where g is not positive */
    bn_choice choice;
    bn_tensor router;           /* experts × D; no data: a single network for all rows */
    const bn_network *networks; /* that one, or one per expert */
} bn_ffn;

/* Number of networks in a layer. */
static inline size_t bn_ffn_networks(const bn_config *c) {
    return c->n_experts > 0 ? c->n_experts : 1;
}

/* networks: out, [bn_ffn_networks]. */
bn_ffn bn_ffn_read(const bn_file *file, uint32_t stack, uint32_t layer, const bn_kernels *kernels,
                   bn_network *networks);

/* The network of attention pooling, which is plain. */
bn_ffn bn_ffn_of_pool(const bn_file *file, uint32_t stack, const bn_kernels *kernels,
                      bn_network *network);

/* --- steps, for rows that may each have a different network --- */

/* The first products of a network for rows starting at `row`: gate and up, or only up. Returns how
 * many. */
int bn_ffn_products(const struct bn_pass *p, const bn_ffn *ffn, const bn_network *network,
                    size_t row, bn_product products[2]);

/* h = act(gate) · up or act(up), then quantized as input of down. network: index for each row;
 * NULL: the first network for all. */
void bn_ffn_activate(struct bn_pass *p, const bn_ffn *ffn, const uint32_t *network);

#endif
