/* SPDX-License-Identifier: MIT
 *
 * stack.c: see stack.h.
 */
#include "stack.h"

#include <stdlib.h>

#include "added.h"

/* A bidirectional text is complete after each layer, so the next layer can reuse the place of its
 * keys. */
static void find_place(bn_stack *s, bn_layer *l) {
    l->part = l->mask.window > 0;
    if (s->config.mask == BN_MASK_BIDIRECTIONAL)
        s->cached[l->part] = 1;
    else
        l->place = s->cached[l->part]++;
}

static bn_layer read_layer(const bn_file *f, uint32_t stack, uint32_t i, const bn_kernels *kernels,
                           bn_network *networks) {
    const bn_config *c = &f->stacks[stack];
    const int global = c->global_every > 0 && (i + 1) % c->global_every == 0;
    return (bn_layer){
        .attn_norm = bn_norm_read(f, stack, i, BN_ATTN_NORM),
        .q_norm = bn_norm_read(f, stack, i, BN_Q_NORM),
        .k_norm = bn_norm_read(f, stack, i, BN_K_NORM),
        .attn_sub_norm = bn_norm_read(f, stack, i, BN_ATTN_SUB_NORM),
        .attn_post_norm = bn_norm_read(f, stack, i, BN_ATTN_POST_NORM),
        .q = bn_file_tensor(f, stack, i, BN_Q, BN_NO_EXPERT),
        .k = bn_file_tensor(f, stack, i, BN_K, BN_NO_EXPERT),
        .v = bn_file_tensor(f, stack, i, BN_V, BN_NO_EXPERT),
        .o = bn_file_tensor(f, stack, i, BN_O, BN_NO_EXPERT),
        .mask.window = global ? 0 : c->sliding_window,
        .table = c->global_every > 0 && !global,
        .ffn = bn_ffn_read(f, stack, i, kernels, networks),
    };
}

/* A tensor outside the layers. */
static bn_tensor read_tensor(const bn_file *f, uint32_t stack, uint32_t role) {
    return bn_file_tensor(f, stack, BN_NO_LAYER, role, BN_NO_EXPERT);
}

static bn_tensor read_head(const bn_file *f, uint32_t stack) {
    const bn_config *c = &f->stacks[stack];
    bn_tensor head = read_tensor(f, stack, BN_HEAD);
    if (c->has_head && c->tie_embeddings) {
        const float *bias = head.bias;
        head = read_tensor(f, stack, BN_EMBEDDING);
        head.bias = bias;
    }
    return head;
}

/* Allocate layers and networks; their number is bounded, as each has records in the file. */
static bn_status make_room(bn_stack *s) {
    s->layers = calloc(s->config.n_layers, sizeof *s->layers);
    s->networks = calloc(s->config.n_layers * bn_ffn_networks(&s->config), sizeof *s->networks);
    return s->layers && s->networks ? BN_OK : BN_ERR_MEMORY;
}

static int is_float(const bn_tensor *t) {
    return t->data && t->scale_scope == BN_SCALE_NONE;
}

static int has_floats(const bn_stack *s) {
    const size_t each = bn_ffn_networks(&s->config), n = s->config.n_layers;
    int floats = 0;
    for (const bn_layer *l = s->layers; l < s->layers + n; l++)
        floats |= is_float(&l->q) || is_float(&l->k) || is_float(&l->v);
    for (const bn_network *w = s->networks; w < s->networks + n * each; w++)
        floats |= is_float(&w->gate) || is_float(&w->up) || is_float(&w->down) ||
                  (s->config.n_experts > 0 && w->up.norm);
    return floats;
}

/* Attention pooling: every head has its own keys; no gate, position encoding or soft-cap. */
static bn_status open_pooling(const bn_file *f, uint32_t index, const bn_kernels *kernels,
                              bn_stack *s) {
    bn_stack *pooling = s->pooling = calloc(1, sizeof *pooling);
    if (!pooling)
        return BN_ERR_MEMORY;
    bn_config *c = &pooling->config;
    *c = s->config;
    c->n_layers = 1;
    c->n_kv_heads = c->n_heads;
    c->norm_flags = c->sliding_window = c->global_every = c->n_experts = c->rope_dim = 0;
    c->position = BN_POSITION_NONE;
    c->ffn = BN_FFN_PLAIN;
    c->residual_scale = 1;
    c->attention_softcap = 0;
    pooling->cached[0] = 1;
    pooling->grouped = s->grouped;
    if (make_room(pooling))
        return BN_ERR_MEMORY;
    *pooling->layers = (bn_layer){
        .attn_norm = s->final_norm,
        .q = read_tensor(f, index, BN_POOL_Q),
        .k = read_tensor(f, index, BN_POOL_K),
        .v = read_tensor(f, index, BN_POOL_V),
        .o = read_tensor(f, index, BN_POOL_O),
        .ffn = bn_ffn_of_pool(f, index, kernels, pooling->networks),
    };
    pooling->floats = has_floats(pooling);
    return BN_OK;
}

bn_status bn_stack_open(const bn_file *f, uint32_t index, const bn_kernels *kernels,
                        bn_stack *stack) {
    const bn_config *c = &f->stacks[index];
    *stack = (bn_stack){
        .config = *c,
        .embedding = read_tensor(f, index, BN_EMBEDDING),
        .head = read_head(f, index),
        .embedding_norm = bn_norm_read(f, index, BN_NO_LAYER, BN_EMBEDDING_NORM),
        .final_norm = bn_norm_read(f, index, BN_NO_LAYER, BN_FINAL_NORM),
        .positions = bn_positions_read(f, index),
        .patch = read_tensor(f, index, BN_PATCH),
        .class_embedding = bn_file_vector(f, index, BN_CLASS_EMBEDDING),
        .projector = read_tensor(f, index, BN_PROJECTOR),
        .probe = bn_file_vector(f, index, BN_POOL_PROBE),
        .join = {.state = bn_norm_read(f, index, BN_NO_LAYER, BN_DRAFT_HIDDEN_NORM),
                 .row = bn_norm_read(f, index, BN_NO_LAYER, BN_DRAFT_EMBEDDING_NORM),
                 .projection = read_tensor(f, index, BN_DRAFT_PROJECTION)},
    };
    bn_status status = bn_adapter_read(f, index, &stack->own);
    for (size_t i = 0; i < f->n_tensors; i++)
        stack->grouped |=
            f->tensors[i].stack == index && f->tensors[i].scale_scope == BN_SCALE_GROUP;
    status = status ? status : make_room(stack);
    for (uint32_t i = 0; i < c->n_layers && !status; i++) {
        bn_network *networks = stack->networks + i * bn_ffn_networks(c);
        stack->layers[i] = read_layer(f, index, i, kernels, networks);
        find_place(stack, &stack->layers[i]);
    }
    stack->floats = !status && has_floats(stack);
    if (!status && stack->probe)
        status = open_pooling(f, index, kernels, stack);
    if (status)
        bn_stack_close(stack);
    return status;
}

void bn_stack_close(bn_stack *stack) {
    bn_stack *within[] = {stack->pooling, stack->draft};
    for (size_t i = 0; i < sizeof within / sizeof *within; i++) {
        if (within[i])
            bn_stack_close(within[i]);
        free(within[i]);
    }
    free(stack->own.linears);
    free(stack->layers);
    free(stack->networks);
    *stack = (bn_stack){0};
}
