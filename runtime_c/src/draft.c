/* SPDX-License-Identifier: MIT
 *
 * draft.c: see draft.h.
 */
#include "draft.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "pass.h"
#include "system/status.h"

/* Requirements of FORMAT.md on the two stacks. */
static bn_status check_together(const bn_config *text, const bn_config *d, char *detail) {
    const struct {
        int wrong;
        const char *says;
    } rules[] = {
        {text->input != BN_INPUT_TOKENS || !text->has_head,
         "the stack before a draft has no tokens or no head, expected both"},
        {memcmp(text->name, d->name, sizeof d->name) == 0,
         "a draft and the stack before it have the same name, expected two names"},
        {d->has_head || d->tie_embeddings, "a draft has a head, expected none"},
        {d->position == BN_POSITION_LEARNED || d->position == BN_POSITION_SINUSOIDAL,
         "a draft has a position table, expected RoPE or none"},
        {(d->norm_flags & BN_HAS_EMBEDDING_NORM) != 0, "a draft has an embedding_norm"},
        {d->pooling || d->out_dim, "a draft has a pooling or a projector, expected none"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].wrong)
            return bn_fail(detail, BN_ERR_CONFIG, "%s", rules[i].says);
    if (d->dim != text->dim || d->max_context != text->max_context)
        return bn_fail(detail, BN_ERR_CONFIG,
                       "a draft has dim %" PRIu32 " and max_context %" PRIu32 ", expected %" PRIu32
                       " and %" PRIu32 ", as the stack before it",
                       d->dim, d->max_context, text->dim, text->max_context);
    return BN_OK;
}

/* The draft uses the workspace and the cache of the text stack. */
static bn_status check_supported(const bn_config *text, const bn_config *d, char *detail) {
    const struct {
        const char *name;
        uint32_t found, expected;
    } same[] = {
        {"mask", text->mask, BN_MASK_CAUSAL},
        {"mask of a draft", d->mask, BN_MASK_CAUSAL},
        {"n_heads of a draft", d->n_heads, text->n_heads},
        {"n_kv_heads of a draft", d->n_kv_heads, text->n_kv_heads},
        {"head_dim of a draft", d->head_dim, text->head_dim},
        {"rope_dim of a draft", d->rope_dim, d->rope_dim ? text->rope_dim : 0},
        {"sliding_window of a draft", d->sliding_window,
         d->sliding_window ? text->sliding_window : 0},
        {"ffn of a draft", d->ffn, text->ffn},
        {"ffn_dim of a draft", d->ffn_dim, text->ffn_dim},
        {"adapters of a draft", d->adapters, 0},
        {"n_experts of a draft", d->n_experts, d->n_experts ? text->n_experts : 0},
        {"experts_per_token of a draft", d->experts_per_token,
         d->n_experts ? text->experts_per_token : 0},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (same[i].found != same[i].expected)
            return bn_fail(detail, BN_ERR_UNSUPPORTED,
                           "a model with a draft has %s %" PRIu32
                           ", which this engine cannot run: expected %" PRIu32,
                           same[i].name, same[i].found, same[i].expected);
    return BN_OK;
}

/* In each part of a cache, the draft's layers follow those of the text stack. */
static void find_places(bn_stack *text, bn_stack *draft) {
    for (uint32_t i = 0; i < draft->config.n_layers; i++)
        draft->layers[i].place += text->cached[draft->layers[i].part];
    for (size_t part = 0; part < BN_CACHE_PARTS; part++)
        text->cached[part] += draft->cached[part];
}

/* A guess costs one layer, most of which would be spent on the keys of a long text. Guesses are
 * right as often without most of these keys (docs/drafts.md), and the resulting tokens do not
 * depend on them. */
static void look_back_less(bn_stack *draft) {
    for (uint32_t i = 0; i < draft->config.n_layers; i++) {
        bn_mask *mask = &draft->layers[i].mask;
        mask->window = mask->window ? bn_min(mask->window, BN_DRAFT_WINDOW) : BN_DRAFT_WINDOW;
    }
}

bn_status bn_draft_open(const bn_file *f, uint32_t index, const bn_kernels *kernels, bn_stack *text,
                        char *detail) {
    const bn_config *c = &f->stacks[index];
    bn_status status = check_together(&text->config, c, detail);
    if (!status)
        status = check_supported(&text->config, c, detail);
    if (status)
        return status;
    bn_stack *draft = calloc(1, sizeof *draft);
    if (!draft)
        return BN_ERR_MEMORY;
    status = bn_stack_open(f, index, kernels, draft);
    if (status) {
        free(draft);
        return status;
    }
    find_places(text, draft);
    look_back_less(draft);
    draft->embedding = text->embedding;
    draft->head = text->head;
    draft->config.vocab_size = text->config.vocab_size;
    draft->config.logit_softcap = text->config.logit_softcap;
    draft->grouped = text->grouped |= draft->grouped;
    text->draft = draft;
    return BN_OK;
}

/* A vector has no embedding row; it is replaced by 0, which a norm leaves 0. */
static void join_rows(void *context, int32_t thread, size_t first, size_t end) {
    bn_pass *p = context;
    const bn_stack *s = p->stack;
    const size_t D = s->config.dim;
    (void)thread;
    for (size_t i = first; i < end; i++) {
        const bn_row *row = &p->w->rows[i];
        float *state = p->w->in.h + i * p->w->in.wide, *next = state + D;
        bn_norm_checked(p, &s->join.state, state, D, row->state, D, D, 1);
        if (row->token == BN_NO_TOKEN)
            memset(next, 0, D * sizeof *next);
        else
            s->embedding.encoding->row(&p->m->kernels, &s->embedding, (size_t)row->token, next);
        bn_norm_checked(p, &s->join.row, next, D, next, D, D, 1);
    }
}

void bn_draft_enter(bn_pass *p) {
    const size_t D = p->stack->config.dim;
    const bn_norm none = {0};
    const bn_product product = {
        .w = &p->stack->join.projection, .y = p->w->x, .y_stride = bn_row_stride(D)};
    bn_each_row(p, join_rows, p);
    bn_quantize_h(p, &none, 2 * D, product.w);
    bn_linear(&p->w->in, 0, p->rows, &product, 1);
}
