/* SPDX-License-Identifier: MIT
 *
 * calls.c: see calls.h.
 */
#include "calls.h"

/* present, bias: booleans, any nonzero value is true. */
static bn_call matrix(bn_form form, uint32_t present, uint32_t rows, uint32_t cols, uint32_t bias) {
    return (bn_call){.form = form,
                     .rows = rows,
                     .cols = cols,
                     .weight = present != 0,
                     .bias = present != 0 && bias != 0};
}

static bn_call vector(uint32_t present, uint32_t cols) {
    return matrix(BN_VECTOR, present, 1, cols, 0);
}

static bn_call norm(const bn_config *c, uint32_t present, uint32_t cols) {
    return matrix(BN_VECTOR, present, 1, cols, c->norm_flags & BN_NORM_BIAS);
}

static bn_call linear(uint32_t present, uint32_t rows, uint32_t cols, uint32_t bias) {
    return matrix(BN_LINEAR, present, rows, cols, bias);
}

uint32_t bn_linear_place(uint32_t role) {
    static const uint8_t places[BN_LAYER_ROLES] = {
        [BN_Q] = 1,    [BN_K] = 2,  [BN_V] = 3,   [BN_O] = 4,
        [BN_GATE] = 5, [BN_UP] = 6, [BN_DOWN] = 7 /* BN_LINEARS */};
    return role < BN_LAYER_ROLES ? places[role] : 0;
}

static bn_call adapted(const bn_config *c, uint32_t role, bn_call call) {
    const uint32_t place = bn_linear_place(role);
    if (call.weight && place > 0 && (c->adapters >> (BN_ADAPTER_ROLES + place - 1) & 1))
        call.rank = c->adapters & BN_ADAPTER_RANK;
    return call;
}

static bn_call each_expert(const bn_config *c, bn_call call) {
    call.experts = c->n_experts;
    return call;
}

static bn_call attention(const bn_config *c, uint32_t role) {
    const uint32_t norms = c->norm_flags, biases = c->bias_flags;
    const uint32_t queries = c->n_heads * c->head_dim, keys = c->n_kv_heads * c->head_dim;
    switch (role) {
    case BN_ATTN_NORM:
        return norm(c, norms & BN_PRE_NORM, c->dim);
    case BN_Q:
        return linear(1, queries, c->dim, biases & BN_BIAS_QKV);
    case BN_K:
    case BN_V:
        return linear(1, keys, c->dim, biases & BN_BIAS_QKV);
    case BN_Q_NORM:
    case BN_K_NORM:
        return norm(c, norms & BN_QK_NORM, c->head_dim);
    case BN_ATTN_SUB_NORM:
        return norm(c, norms & BN_SUB_NORM, queries);
    case BN_O:
        return linear(1, c->dim, queries, biases & BN_BIAS_O);
    default: /* BN_ATTN_POST_NORM */
        return norm(c, norms & (BN_POST_NORM | BN_RESIDUAL_NORM), c->dim);
    }
}

static bn_call feed_forward(const bn_config *c, uint32_t role) {
    const uint32_t norms = c->norm_flags, bias = c->bias_flags & BN_BIAS_FFN;
    switch (role) {
    case BN_FFN_NORM:
        return norm(c, norms & BN_PRE_NORM, c->dim);
    case BN_ROUTER:
        return matrix(BN_DENSE, c->n_experts > 0, c->n_experts, c->dim, 0);
    case BN_GATE:
        return each_expert(c, linear(c->ffn == BN_FFN_GATED, c->ffn_dim, c->dim, bias));
    case BN_UP:
        return each_expert(c, linear(1, c->ffn_dim, c->dim, bias));
    case BN_FFN_SUB_NORM:
        return each_expert(c, norm(c, norms & BN_SUB_NORM, c->ffn_dim));
    case BN_DOWN:
        return each_expert(c, linear(1, c->dim, c->ffn_dim, bias));
    default: /* BN_FFN_POST_NORM */
        return norm(c, norms & (BN_POST_NORM | BN_RESIDUAL_NORM), c->dim);
    }
}

/* Tensors before the first layer and after the last. */
static bn_call ends(const bn_config *c, uint32_t role) {
    const uint32_t norms = c->norm_flags, biases = c->bias_flags;
    const uint32_t rope = c->position == BN_POSITION_ROPE, draft = c->input == BN_INPUT_DRAFT;
    switch (role) {
    case BN_EMBEDDING:
        return matrix(BN_TABLE, c->input == BN_INPUT_TOKENS || (c->has_head && c->tie_embeddings),
                      c->vocab_size, c->dim, 0);
    case BN_POSITION:
        return matrix(BN_DENSE,
                      c->position == BN_POSITION_LEARNED || c->position == BN_POSITION_SINUSOIDAL,
                      c->max_context, c->dim, 0);
    case BN_FINAL_NORM:
        return norm(c, norms & BN_HAS_FINAL_NORM, c->dim);
    case BN_HEAD: {
        bn_call head =
            matrix(BN_TABLE, c->has_head && !c->tie_embeddings, c->vocab_size, c->dim, 0);
        /* without a weight if the head is tied */
        head.bias = c->has_head && (biases & BN_BIAS_HEAD) != 0;
        return head;
    }
    case BN_EMBEDDING_NORM:
        return norm(c, norms & BN_HAS_EMBEDDING_NORM, c->dim);
    case BN_ROPE_FREQUENCIES:
        return vector(rope, c->rope_dim / 2);
    case BN_ROPE_LOCAL_FREQUENCIES:
        return vector(rope && c->global_every > 0, c->rope_dim / 2);
    case BN_DRAFT_HIDDEN_NORM:
    case BN_DRAFT_EMBEDDING_NORM:
        return norm(c, draft, c->dim);
    case BN_DRAFT_PROJECTION:
        return linear(draft, c->dim, 2 * c->dim, 0);
    case BN_PATCH:
        return matrix(BN_DENSE, c->input == BN_INPUT_IMAGES, c->dim,
                      c->channels * c->patch_size * c->patch_size, biases & BN_BIAS_PATCH);
    case BN_CLASS_EMBEDDING:
        return vector(c->class_token != 0, c->dim);
    case BN_PROJECTOR:
        return matrix(BN_DENSE, c->out_dim > 0, c->out_dim, c->dim, biases & BN_BIAS_PROJECTOR);
    default:
        return (bn_call){0};
    }
}

/* Attention pooling: an additional layer with a learned query. */
static bn_call pool(const bn_config *c, uint32_t role) {
    const uint32_t biases = c->bias_flags, queries = c->n_heads * c->head_dim;
    const uint32_t present = c->pooling == BN_POOL_ATTENTION;
    switch (role) {
    case BN_POOL_PROBE:
        return vector(present, c->dim);
    case BN_POOL_Q:
    case BN_POOL_K:
    case BN_POOL_V:
        return linear(present, queries, c->dim, biases & BN_BIAS_QKV);
    case BN_POOL_O:
        return linear(present, c->dim, queries, biases & BN_BIAS_O);
    case BN_POOL_NORM:
        return norm(c, present, c->dim);
    case BN_POOL_UP:
        return linear(present, c->ffn_dim, c->dim, biases & BN_BIAS_FFN);
    default: /* BN_POOL_DOWN */
        return linear(present, c->dim, c->ffn_dim, biases & BN_BIAS_FFN);
    }
}

static bn_call linear_norm(const bn_config *c, uint32_t of) {
    const bn_call linear = bn_call_for(c, of);
    const uint32_t present = (c->norm_flags & BN_LINEAR_NORMS) && linear.form == BN_LINEAR;
    bn_call call = norm(c, present && linear.weight, linear.cols);
    call.experts = linear.experts;
    return call;
}

bn_call bn_call_for(const bn_config *c, uint32_t role) {
    if (role >= BN_ATTN_NORM && role <= BN_ATTN_POST_NORM)
        return adapted(c, role, attention(c, role));
    if (role >= BN_FFN_NORM && role < BN_LAYER_ROLES)
        return adapted(c, role, feed_forward(c, role));
    if (role > BN_LINEAR_NORM && role < BN_LINEAR_NORM + BN_LAYER_ROLES)
        return linear_norm(c, role - BN_LINEAR_NORM);
    return role >= BN_POOL_PROBE && role < BN_STACK_ROLES ? pool(c, role) : ends(c, role);
}
