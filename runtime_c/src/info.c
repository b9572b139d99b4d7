/* SPDX-License-Identifier: MIT
 *
 * info.c: what a model tells of itself: its shape, what a token costs, and parts of its file.
 */
#include <string.h>

#include "cache.h"
#include "linear/sketch.h"
#include "model.h"
#include "screen.h"

/* --- costs --- */

/* Add what one matrix costs. */
static void count(bn_model_info *info, const bn_tensor *t) {
    uint64_t scales = 0;
    bn_tensor_scale_size(t->scale_scope, t->rows, t->cols, &scales);
    info->bytes_per_token += t->bytes + scales;
    if (t->encoding && t->encoding->ternary) {
        info->ternary_weights += (uint64_t)t->rows * t->cols;
        info->macs_per_token += (uint64_t)t->rows * t->cols;
    }
}

/* Add the cost of a layer's networks; of experts, only those that a token uses. */
static void count_networks(bn_model_info *info, const bn_ffn *ffn, size_t n) {
    bn_model_info all = {0};
    for (size_t i = 0; i < n; i++) {
        count(&all, &ffn->networks[i].gate);
        count(&all, &ffn->networks[i].up);
        count(&all, &ffn->networks[i].down);
    }
    const size_t taken = ffn->router.data ? ffn->choice.taken : 1;
    info->ternary_weights += all.ternary_weights;
    info->bytes_per_token += all.bytes_per_token / n * taken; /* all experts cost the same */
    info->macs_per_token += all.macs_per_token / n * taken;
    count(info, &ffn->router);
}

/* Add the cost per token of the layers. */
static void count_layers(const bn_stack *stack, bn_model_info *info) {
    for (uint32_t i = 0; i < stack->config.n_layers; i++) {
        const bn_layer *l = &stack->layers[i];
        count(info, &l->q);
        count(info, &l->k);
        count(info, &l->v);
        count(info, &l->o);
        count_networks(info, &l->ffn, bn_ffn_networks(&stack->config));
    }
}

/* Add the cost per token of the layers and the head. */
static void count_stack(const bn_stack *stack, bn_model_info *info) {
    bn_model_info besides = {0}; /* not part of decoding a token */
    count_layers(stack, info);
    if (stack->pooling)
        count_layers(stack->pooling, &besides);
    if (stack->draft) {
        count_layers(stack->draft, &besides);
        count(&besides, &stack->draft->join.projection);
    }
    info->ternary_weights += besides.ternary_weights;
    count(info, &stack->head);
    if (bn_head_screens(stack))
        info->bytes_per_token -=
            bn_sketch_at(stack->head.rows, stack->head.cols).tiles; /* its codes */
}

/* The numbers that training learns. Tables that a configuration implies are stored beside them. */
static uint64_t count_parameters(const bn_file *file) {
    uint64_t n = 0;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const bn_record *r = &file->tensors[i];
        const int sines =
            r->role == BN_POSITION && file->stacks[r->stack].position == BN_POSITION_SINUSOIDAL;
        if (!sines && r->role != BN_ROPE_FREQUENCIES && r->role != BN_ROPE_LOCAL_FREQUENCIES)
            n += (uint64_t)r->rows * r->cols;
    }
    return n;
}

/* --- answers --- */

uint64_t bn_model_cache_bytes(const bn_model *m) {
    return m ? atomic_load(&m->budget.used) : 0;
}

bn_status bn_model_get_info(const bn_model *m, bn_model_info *info) {
    if (!m || !info)
        return BN_ERR_ARGUMENT;
    const bn_stack *stack = bn_reads(m) ? &m->stack : &m->vision;
    const bn_config *c = &stack->config;
    bn_model_info of_images = {0};
    *info = (bn_model_info){.vocab_size = c->vocab_size,
                            .dim = c->dim,
                            .n_layers = c->n_layers,
                            .n_heads = c->n_heads,
                            .n_kv_heads = c->n_kv_heads,
                            .head_dim = c->head_dim,
                            .ffn_dim = c->ffn_dim,
                            .max_context = c->max_context,
                            .has_text = (uint32_t)bn_reads(m),
                            .has_head = c->has_head,
                            .has_embedding = stack->embedding.data != NULL,
                            .has_draft = stack->draft != NULL,
                            .pooling = bn_reads(m) ? c->pooling : 0,
                            .width = (uint32_t)bn_width(c),
                            .mask = c->mask,
                            .sliding_window = c->sliding_window,
                            .file_bytes = m->mapping.size,
                            .parameters = count_parameters(&m->file),
                            .threads = bn_pool_running(m->pool),
                            .isa = m->kernels.isa};
    for (int32_t type = 0; type < BN_KV_TYPES && bn_reads(m); type++) {
        uint64_t *local =
            c->mask == BN_MASK_CAUSAL ? info->kv_window_bytes_per_token : info->kv_bytes_per_token;
        info->kv_bytes_per_token[type] = bn_cache_token_bytes(&m->stack, type, 0);
        local[type] += bn_cache_token_bytes(&m->stack, type, 1);
    }
    count_stack(stack, info);
    if (stack != &m->vision && bn_sees(m))
        count_stack(&m->vision, &of_images);
    info->ternary_weights += of_images.ternary_weights;
    return BN_OK;
}

bn_status bn_model_get_image_info(const bn_model *m, bn_image_info *info) {
    if (!m || !info)
        return BN_ERR_ARGUMENT;
    if (!bn_sees(m))
        return BN_ERR_INPUT;
    const bn_config *c = &m->vision.config, *text = bn_reads(m) ? &m->stack.config : c;
    const bn_config *alike = text->similarity_scale > 0 ? text : c;
    bn_model_info costs = {0};
    count_layers(&m->vision, &costs);
    *info = (bn_image_info){.image_size = c->image_size,
                            .patch_size = c->patch_size,
                            .channels = c->channels,
                            .n_tokens = c->max_context,
                            .width = (uint32_t)bn_width(c),
                            .pooled = c->pooling != 0,
                            .image_token = text->image_token ? (int32_t)text->image_token : -1,
                            .similarity_scale = alike->similarity_scale,
                            .similarity_bias = alike->similarity_bias,
                            .macs_per_image = costs.macs_per_token * c->max_context};
    memcpy(info->pixel_mean, c->pixel_mean, sizeof c->pixel_mean);
    memcpy(info->pixel_std, c->pixel_std, sizeof c->pixel_std);
    return BN_OK;
}

bn_status bn_model_get_section(const bn_model *m, bn_section which, const uint8_t **bytes,
                               size_t *size) {
    if (!m || !bytes || !size || which < BN_SECTION_METADATA || which > BN_SECTION_TEMPLATE)
        return BN_ERR_ARGUMENT;
    *bytes = m->file.section[which];
    *size = m->file.section_size[which];
    return BN_OK;
}

bn_status bn_model_get_adapter(const bn_model *m, int32_t i, const uint8_t **bytes, size_t *size) {
    if (!m || i < 1 || i > m->n_added || !bytes || !size)
        return BN_ERR_ARGUMENT;
    *bytes = m->added[i - 1].file.bytes;
    *size = m->added[i - 1].file.size;
    return BN_OK;
}

bn_status bn_model_get_file(const bn_model *m, const uint8_t **bytes, size_t *size) {
    if (!m || !bytes || !size)
        return BN_ERR_ARGUMENT;
    *bytes = m->file.bytes;
    *size = m->file.size;
    return BN_OK;
}
