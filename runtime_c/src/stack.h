/* SPDX-License-Identifier: MIT
 *
 * stack.h: one stack of layers, read from the tables of a packed file once, when a model is opened.
 * Later code does not access the file.
 *
 * Shape letters: B rows computed together, D dim, H query heads, G KV heads, E head_dim, F ffn_dim,
 * V vocab_size, C cache capacity in tokens, O floats of an output vector (bn_width).
 */
#ifndef BITNET_STACK_H
#define BITNET_STACK_H

#include "file/file.h"
#include "mask.h"
#include "network.h"
#include "norm.h"
#include "positions.h"

/* Cache parts: layers that see whole texts, and layers with a window. */
enum { BN_CACHE_PARTS = 2 };

typedef struct bn_layer {
    uint32_t part, place; /* cache part, and index of the layer in it (cache.h) */
    bn_norm attn_norm, q_norm, k_norm, attn_sub_norm, attn_post_norm;
    bn_tensor q, k, v, o; /* H·E × D, G·E × D, G·E × D, D × H·E */
    bn_mask mask;
    uint32_t table; /* index of the position table */
    bn_ffn ffn;
} bn_layer;

/* How a draft combines a state and a token (draft.h). */
typedef struct bn_join {
    bn_norm state, row;
    bn_tensor projection; /* D × 2·D; no data: the stack is not a draft */
} bn_join;

typedef struct bn_stack {
    bn_config config;
    bn_tensor embedding, head;          /* V × D; the same when tied; no data without a head */
    bn_norm embedding_norm, final_norm; /* [D] each */
    bn_positions positions;
    bn_tensor patch;              /* D × pixels of a patch; no data: not a vision stack */
    const float *class_embedding; /* [D] input row before the patches, or NULL */
    bn_tensor projector;          /* out_dim × D; no data: states are the output */
    const float *probe;           /* [D] query of attention pooling, or NULL */
    struct bn_stack *pooling;     /* attention pooling, a stack of one layer (probe.h), or NULL */
    bn_join join;
    struct bn_stack *draft;          /* guesses tokens for this one (draft.h), or NULL */
    bn_layer *layers;                /* [n_layers] */
    bn_network *networks;            /* [n_layers][bn_ffn_networks] */
    uint32_t cached[BN_CACHE_PARTS]; /* layers with keys and values in a cache, by part */
    bn_adapter own;                  /* the adapter in the model's file, for all texts, or {0} */
    int32_t grouped;                 /* 1: a matrix has a scale per 128 columns */
    int32_t floats; /* 1: a matrix of a layer has float weights, or one of an expert has its own
                     * norm */
} bn_stack;

/* Read stack `index` of a parsed file. Fails only with BN_ERR_MEMORY. */
bn_status bn_stack_open(const bn_file *file, uint32_t index, const bn_kernels *kernels,
                        bn_stack *stack);
void bn_stack_close(bn_stack *stack); /* {0} is allowed */

/* Floats of an output vector of the stack, after the projector if there is one. */
static inline size_t bn_width(const bn_config *c) {
    return c->out_dim > 0 ? c->out_dim : c->dim;
}

#endif
