/* SPDX-License-Identifier: MIT
 *
 * stack.h: one stack of layers, read from the tables of a packed file once, when a model opens.
 * Behind it nobody looks into the file.
 *
 * Shape letters: B rows computed together, D dim, H query heads, G KV heads, E head_dim,
 * F ffn_dim, V vocab_size, C tokens a cache holds, O floats of what leaves (bn_width).
 */
#ifndef BITNET_STACK_H
#define BITNET_STACK_H

#include "file/file.h"
#include "mask.h"
#include "network.h"
#include "norm.h"
#include "positions.h"

/* Layers that see whole texts, and layers with a window. */
enum { BN_CACHE_PARTS = 2 };

typedef struct bn_layer {
    uint32_t part, place; /* of a cache, and of its heads there (cache.h) */
    bn_norm attn_norm, q_norm, k_norm, attn_sub_norm, attn_post_norm;
    bn_tensor q, k, v, o; /* H·E × D, G·E × D, G·E × D, D × H·E */
    bn_mask mask;
    uint32_t table; /* which of the tables of positions */
    bn_ffn ffn;
} bn_layer;

/* How a draft makes one of a state and a token (draft.h). */
typedef struct bn_join {
    bn_norm state, row;
    bn_tensor projection; /* D × 2·D; no data: the stack is no draft */
} bn_join;

typedef struct bn_stack {
    bn_config config;
    bn_tensor embedding, head;          /* V × D; the same when tied; no data without a head */
    bn_norm embedding_norm, final_norm; /* [D] each */
    bn_positions positions;
    bn_tensor patch;              /* D × pixels of a patch; no data: it sees no images */
    const float *class_embedding; /* [D] of what stands before the patches, or NULL */
    bn_tensor projector;          /* out_dim × D; no data: states leave as they are */
    const float *probe;           /* [D] the query of pooling by attention, or NULL */
    struct bn_stack *pooling;     /* which is a stack of one layer (probe.h), or NULL */
    bn_join join;
    struct bn_stack *draft;          /* which guesses tokens for this one (draft.h), or NULL */
    bn_layer *layers;                /* [n_layers] */
    bn_network *networks;            /* [n_layers][bn_ffn_networks] */
    uint32_t cached[BN_CACHE_PARTS]; /* layers whose keys and values a cache holds, by part */
    bn_adapter own;                  /* of its own, for all texts, or {0} */
    int32_t grouped;                 /* a matrix has a scale for every 128 columns */
    int32_t floats; /* a matrix of a layer is floats, or that of an expert has a norm of its own */
} bn_stack;

/* Read stack `index` of a file that was parsed. Fails with BN_ERR_MEMORY, or BN_ERR_UNSUPPORTED and
 * by name what this engine does not do yet. */
bn_status bn_stack_open(const bn_file *file, uint32_t index, const bn_kernels *kernels,
                        bn_stack *stack, char *detail);
void bn_stack_close(bn_stack *stack); /* {0} is allowed */

/* Floats of what leaves the stack, behind the projector if there is one. */
static inline size_t bn_width(const bn_config *c) {
    return c->out_dim > 0 ? c->out_dim : c->dim;
}

/* Add what its layers cost per token; the same and what its head costs. */
void bn_stack_count_layers(const bn_stack *stack, bn_model_info *info);
void bn_stack_count(const bn_stack *stack, bn_model_info *info);

#endif
