/* SPDX-License-Identifier: MIT
 *
 * stack.c: see stack.h.
 */
#include "stack.h"

#include <stdlib.h>

#include "head.h"
#include "linear/sketch.h"
#include "system/status.h"

/* What a file may say and this engine does not do yet, each by name. */
static bn_status check_supported(const bn_config *c, char *detail) {
    const struct {
        int refused;
        const char *what;
    } limits[] = {
        {c->input == BN_INPUT_IMAGES, "input = images"},
        {c->input == BN_INPUT_DRAFT, "input = draft"},
        {c->pooling == BN_POOL_ATTENTION, "pooling = attention"},
        {c->out_dim != 0, "a projector"},
        {c->image_token != 0, "an image token"},
        {c->adapters != 0, "adapters"},
    };
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
        if (limits[i].refused)
            return bn_fail(detail, BN_ERR_UNSUPPORTED,
                           "the model has %s, which this engine cannot run", limits[i].what);
    return BN_OK;
}

/* A bidirectional text is done when a layer is: the next may have the place of its keys. */
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

static bn_tensor read_head(const bn_file *f, uint32_t stack) {
    const bn_config *c = &f->stacks[stack];
    bn_tensor head = bn_file_tensor(f, stack, BN_NO_LAYER, BN_HEAD, BN_NO_EXPERT);
    if (c->has_head && c->tie_embeddings) {
        const float *bias = head.bias;
        head = bn_file_tensor(f, stack, BN_NO_LAYER, BN_EMBEDDING, BN_NO_EXPERT);
        head.bias = bias;
    }
    return head;
}

bn_status bn_stack_open(const bn_file *f, uint32_t index, const bn_kernels *kernels,
                        bn_stack *stack, char *detail) {
    const bn_config *c = &f->stacks[index];
    const bn_status status = check_supported(c, detail);
    if (status)
        return status;
    const size_t each = bn_ffn_networks(c); /* these and the layers have records in the file */
    bn_layer *layers = calloc(c->n_layers, sizeof *layers);
    bn_network *networks = calloc(c->n_layers * each, sizeof *networks);
    if (!layers || !networks) {
        free(layers);
        free(networks);
        return BN_ERR_MEMORY;
    }
    *stack = (bn_stack){
        .config = *c,
        .embedding = bn_file_tensor(f, index, BN_NO_LAYER, BN_EMBEDDING, BN_NO_EXPERT),
        .head = read_head(f, index),
        .embedding_norm = bn_norm_read(f, index, BN_NO_LAYER, BN_EMBEDDING_NORM),
        .final_norm = bn_norm_read(f, index, BN_NO_LAYER, BN_FINAL_NORM),
        .positions = bn_positions_read(f, index),
        .layers = layers,
        .networks = networks,
    };
    for (uint32_t i = 0; i < c->n_layers; i++) {
        layers[i] = read_layer(f, index, i, kernels, networks + i * each);
        find_place(stack, &layers[i]);
    }
    for (size_t i = 0; i < f->n_tensors; i++)
        stack->grouped |=
            f->tensors[i].stack == index && f->tensors[i].scale_scope == BN_SCALE_GROUP;
    return BN_OK;
}

void bn_stack_close(bn_stack *stack) {
    free(stack->layers);
    free(stack->networks);
    *stack = (bn_stack){0};
}

/* Adds what one matrix costs. */
static void count(bn_model_info *info, const bn_tensor *t) {
    uint64_t scales = 0;
    bn_tensor_scale_size(t->scale_scope, t->rows, t->cols, &scales);
    info->bytes_per_token += t->bytes + scales;
    if (t->encoding && t->encoding->ternary) {
        info->ternary_weights += (uint64_t)t->rows * t->cols;
        info->macs_per_token += (uint64_t)t->rows * t->cols;
    }
}

/* Adds what the networks of a layer cost: of experts, as many as a token takes. */
static void count_networks(bn_model_info *info, const bn_ffn *ffn, size_t n) {
    bn_model_info all = {0};
    for (size_t i = 0; i < n; i++) {
        count(&all, &ffn->networks[i].gate);
        count(&all, &ffn->networks[i].up);
        count(&all, &ffn->networks[i].down);
    }
    const size_t taken = ffn->router.data ? ffn->choice.taken : 1;
    info->ternary_weights += all.ternary_weights;
    info->bytes_per_token += all.bytes_per_token / n * taken; /* experts are alike */
    info->macs_per_token += all.macs_per_token / n * taken;
    count(info, &ffn->router);
}

void bn_stack_count(const bn_stack *stack, bn_model_info *info) {
    for (uint32_t i = 0; i < stack->config.n_layers; i++) {
        const bn_layer *l = &stack->layers[i];
        const bn_tensor *matrices[] = {&l->q, &l->k, &l->v, &l->o};
        for (size_t j = 0; j < sizeof matrices / sizeof *matrices; j++)
            count(info, matrices[j]);
        count_networks(info, &l->ffn, bn_ffn_networks(&stack->config));
    }
    count(info, &stack->head);
    if (bn_head_screens(stack))
        info->bytes_per_token -=
            bn_sketch_at(stack->head.rows, stack->head.cols).tiles; /* its codes */
}
