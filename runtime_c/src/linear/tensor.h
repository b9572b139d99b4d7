/* SPDX-License-Identifier: MIT
 *
 * tensor.h: a tensor of a model: its role, and where its data is in the file.
 */
#ifndef BITNET_TENSOR_H
#define BITNET_TENSOR_H

#include "encodings.h"

/* FORMAT.md §3. Roles 1..63 belong to a layer. */
enum {
    BN_ATTN_NORM = 1,
    BN_Q,
    BN_K,
    BN_V,
    BN_Q_NORM,
    BN_K_NORM,
    BN_ATTN_SUB_NORM,
    BN_O,
    BN_ATTN_POST_NORM,
    BN_FFN_NORM,
    BN_ROUTER,
    BN_GATE,
    BN_UP,
    BN_FFN_SUB_NORM,
    BN_DOWN,
    BN_FFN_POST_NORM,
    BN_LAYER_ROLES,      /* one past the last */
    BN_LINEAR_NORM = 32, /* + role of the linear */
    BN_EMBEDDING = 64,
    BN_POSITION,
    BN_FINAL_NORM,
    BN_HEAD,
    BN_EMBEDDING_NORM,
    BN_ROPE_FREQUENCIES,
    BN_ROPE_LOCAL_FREQUENCIES,
    BN_DRAFT_HIDDEN_NORM,
    BN_DRAFT_EMBEDDING_NORM,
    BN_DRAFT_PROJECTION,
    BN_PATCH,
    BN_CLASS_EMBEDDING,
    BN_PROJECTOR,
    BN_POOL_PROBE = 80,
    BN_POOL_Q,
    BN_POOL_K,
    BN_POOL_V,
    BN_POOL_O,
    BN_POOL_NORM,
    BN_POOL_UP,
    BN_POOL_DOWN,
    BN_STACK_ROLES /* one past the last */
};

/* Kind of a record. */
enum { BN_WEIGHT, BN_BIAS, BN_ADAPTER_IN, BN_ADAPTER_OUT };

typedef struct bn_tensor {
    const uint8_t *data;          /* NULL: the configuration has no such tensor */
    const float *scales;          /* 1 or rows by scale_scope; NULL for none */
    const uint16_t *group_scales; /* for scope GROUP: f16 [panels][ceil(cols/128)][16 rows] */
    const float *bias;            /* one per output (of a norm: per column), or NULL */
    const float *norm;      /* of a linear: gain of the norm on its input (linear_norm), or NULL */
    const float *norm_bias; /* and its bias, or NULL */
    uint64_t bytes;         /* of data */
    uint32_t rows, cols;    /* N outputs, K inputs */
    const bn_encoding *encoding; /* NULL without data */
    uint8_t scale_scope;
    uint32_t number; /* of a layer's linear: its index in adapters, from 1 in each stack; else 0 */
} bn_tensor;

static inline size_t bn_panels(const bn_tensor *t) {
    return bn_div_up(t->rows, BN_PANEL);
}

#endif
