/* SPDX-License-Identifier: MIT
 *
 * stacks.c: checks the stack records of a packed file (export/FORMAT.md §2). Any configuration that
 * the format allows passes; those that the engine cannot run are refused in stack.c, draft.c and
 * model.c.
 */
#include "calls.h"

#include <inttypes.h>
#include <math.h>

_Static_assert(sizeof(bn_config) == 256, "a stack record has 64 words");

enum { MAX_STACKS = 16, MAX_ATTENTION_DIM = 262144, MAX_VALUES = 1 << 26, MAX_TOKENS = 1 << 16 };

static bn_status check_ranges(const bn_config *c, uint32_t stack, char *detail) {
    const uint32_t rope = c->position == BN_POSITION_ROPE;
    const uint32_t needs_vocab = c->input == BN_INPUT_TOKENS || c->has_head;
    const uint32_t images = c->input == BN_INPUT_IMAGES;
    const struct {
        const char *name;
        uint32_t value, low, high;
    } ranges[] = {
        {"input", c->input, 0, BN_INPUT_DRAFT},
        {"mask", c->mask, images ? BN_MASK_BIDIRECTIONAL : 0,
         images ? BN_MASK_BIDIRECTIONAL : BN_MASK_PREFIX},
        {"has_head", c->has_head, 0, !images},
        {"vocab_size", c->vocab_size, needs_vocab, 1u << 21},
        {"dim", c->dim, 1, 65536},
        {"n_layers", c->n_layers, 1, 1024},
        {"n_heads", c->n_heads, 1, 1024},
        {"n_kv_heads", c->n_kv_heads, 1, c->n_heads},
        {"head_dim", c->head_dim, 1, 1024},
        {"ffn_dim", c->ffn_dim, 1, 262144},
        {"max_context", c->max_context, 1, 1u << 24},
        {"sliding_window", c->sliding_window, 0, 1u << 24},
        {"norm", c->norm, 0, BN_NORM_LAYER},
        {"norm_flags", c->norm_flags, 0, 511},
        {"ffn", c->ffn, 0, 1},
        {"activation", c->activation, 0, BN_ACT_GELU_ERF},
        {"n_experts", c->n_experts, 0, 65534},
        {"experts_per_token", c->experts_per_token, c->n_experts > 0, c->n_experts},
        {"position", c->position, 0, BN_POSITION_NONE},
        {"rope_dim", c->rope_dim, rope ? 2 : 0, rope ? c->head_dim : 0},
        {"bias_flags", c->bias_flags, 0, 63},
        {"tie_embeddings", c->tie_embeddings, 0, 1},
        {"pooling", c->pooling, 0, images ? BN_POOL_ATTENTION : BN_POOL_ATTENTION - 1},
        {"global_every", c->global_every, 0, 1024},
        {"normalize_routing", c->normalize_routing, 0, 1},
        {"first_position", c->first_position, 0, rope},
        {"image_size", c->image_size, images, images ? 1u << 14 : 0},
        {"patch_size", c->patch_size, images, images ? c->image_size : 0},
        {"channels", c->channels, images, images ? 3 : 0},
        {"class_token", c->class_token, 0, images},
        {"out_dim", c->out_dim, 0, 65536},
        {"image_token", c->image_token, 0, c->vocab_size > 0 ? c->vocab_size - 1 : 0},
        {"adapters", c->adapters, 0, (1u << (BN_ADAPTER_ROLES + BN_LINEARS)) - 1},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (ranges[i].value < ranges[i].low || ranges[i].value > ranges[i].high)
            return bn_fail(detail, BN_ERR_CONFIG,
                           "stack %" PRIu32 ": %s is %" PRIu32 ", expected %" PRIu32 " to %" PRIu32,
                           stack, ranges[i].name, ranges[i].value, ranges[i].low, ranges[i].high);
    return BN_OK;
}

static bn_status check_relations(const bn_config *c, uint32_t stack, char *detail) {
    if (c->n_heads % c->n_kv_heads != 0)
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %" PRIu32 ": n_heads is %" PRIu32
                       ", expected a multiple of n_kv_heads = %" PRIu32,
                       stack, c->n_heads, c->n_kv_heads);
    if (c->n_heads * c->head_dim > MAX_ATTENTION_DIM) /* at most 2^20, no overflow */
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %" PRIu32 ": n_heads * head_dim is %" PRIu32 ", expected at most %d",
                       stack, c->n_heads * c->head_dim, MAX_ATTENTION_DIM);
    if (c->rope_dim % 2 != 0)
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %" PRIu32 ": rope_dim is %" PRIu32 ", expected an even number", stack,
                       c->rope_dim);
    if ((c->norm_flags & BN_POST_NORM) && (c->norm_flags & BN_RESIDUAL_NORM))
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %" PRIu32 ": norm_flags are %" PRIu32
                       ", expected post_norm or residual_norm and not both",
                       stack, c->norm_flags);
    if (((c->adapters & BN_ADAPTER_RANK) != 0) != (c->adapters >> BN_ADAPTER_ROLES != 0))
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %" PRIu32 ": adapters is %" PRIu32 ", expected a rank and roles or 0",
                       stack, c->adapters);
    if (c->global_every == 1 || (c->global_every > 0 && c->sliding_window == 0))
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %" PRIu32 ": global_every is %" PRIu32
                       " with sliding_window = %" PRIu32 ", expected 0, or >= 2 and a window",
                       stack, c->global_every, c->sliding_window);
    return BN_OK;
}

static bn_status check_floats(const bn_config *c, uint32_t stack, char *detail) {
    const struct {
        const char *name;
        float value;
        int zero_allowed;
    } floats[] = {
        {"norm_eps", c->norm_eps, 0},
        {"rope_attention_factor", c->rope_attention_factor, 0},
        {"embedding_scale", c->embedding_scale, 0},
        {"residual_scale", c->residual_scale, 0},
        {"attention_scale", c->attention_scale, 0},
        {"attention_softcap", c->attention_softcap, 1},
        {"logit_softcap", c->logit_softcap, 1},
        {"similarity_scale", c->similarity_scale, 1},
    };
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        const float value = floats[i].value;
        if (!isfinite(value) || !(floats[i].zero_allowed ? value >= 0.0f : value > 0.0f))
            return bn_fail(detail, BN_ERR_CONFIG,
                           "stack %" PRIu32 ": %s is %g, expected a finite number %s 0", stack,
                           floats[i].name, (double)value, floats[i].zero_allowed ? ">=" : ">");
    }
    if (!isfinite(c->similarity_bias))
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %" PRIu32 ": similarity_bias is %g, expected a finite number", stack,
                       (double)c->similarity_bias);
    return BN_OK;
}

static int is_zero(float x) {
    return x == 0 && !signbit(x);
}

/* Pixels: what a channel that there is not has is 0. */
static bn_status check_images(const bn_config *c, uint32_t stack, char *detail) {
    for (uint32_t i = 0; i < 3; i++) {
        const int used = i < c->channels;
        const float mean = c->pixel_mean[i], std = c->pixel_std[i];
        if (used ? !(isfinite(mean) && isfinite(std) && std > 0) : !is_zero(mean) || !is_zero(std))
            return bn_fail(detail, BN_ERR_CONFIG,
                           "stack %" PRIu32 ": pixel_mean and pixel_std of channel %" PRIu32
                           " are %g and %g, expected %s",
                           stack, i, (double)mean, (double)std,
                           used ? "finite numbers, the second > 0" : "0, there is no such channel");
    }
    if (c->input == BN_INPUT_IMAGES) {
        const uint32_t values = c->image_size * c->image_size * c->channels; /* below 2^30 */
        if (values > MAX_VALUES)
            return bn_fail(detail, BN_ERR_CONFIG,
                           "stack %" PRIu32 ": image_size is %" PRIu32 " with channels = %" PRIu32
                           ", expected at most %d values of pixels",
                           stack, c->image_size, c->channels, MAX_VALUES);
        const uint32_t side = c->image_size / c->patch_size; /* at most 2^14 */
        const uint32_t tokens = side * side + c->class_token;
        if (c->max_context != tokens)
            return bn_fail(detail, BN_ERR_CONFIG,
                           "stack %" PRIu32 ": max_context is %" PRIu32 ", expected %" PRIu32
                           ", the tokens of an image",
                           stack, c->max_context, tokens);
        if (tokens > MAX_TOKENS)
            return bn_fail(detail, BN_ERR_CONFIG,
                           "stack %" PRIu32 ": an image has %" PRIu32
                           " tokens, expected at most %d",
                           stack, tokens, MAX_TOKENS);
    }
    return BN_OK;
}

static bn_status check_name(const bn_config *c, uint32_t stack, char *detail) {
    int ended = 0;
    for (size_t i = 0; i < sizeof c->name; i++) {
        if (ended && c->name[i] != 0)
            return bn_fail(detail, BN_ERR_CONFIG,
                           "stack %" PRIu32 ": name goes on after its end, expected zeros", stack);
        ended |= c->name[i] == 0;
    }
    if (!ended)
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %" PRIu32 ": name has 64 bytes, expected at most 63", stack);
    return BN_OK;
}

bn_status bn_check_stacks(const bn_file *file, char *detail) {
    static bn_status (*const checks[])(const bn_config *, uint32_t stack, char *detail) = {
        check_ranges, check_relations, check_floats, check_images, check_name};
    if (file->n_stacks > MAX_STACKS)
        return bn_fail(detail, BN_ERR_CONFIG, "the file has %zu stacks, expected 1 to %d",
                       file->n_stacks, MAX_STACKS);
    for (uint32_t i = 0; i < file->n_stacks; i++) {
        bn_status status = BN_OK;
        for (size_t check = 0; check < sizeof checks / sizeof *checks && !status; check++)
            status = checks[check](&file->stacks[i], i, detail);
        if (status)
            return status;
    }
    return BN_OK;
}
