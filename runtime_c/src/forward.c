/* SPDX-License-Identifier: MIT
 *
 * forward.c: the transformer, top to bottom. Read this first.
 *
 *     x = norm( embedding[token] + positions[place] ), or a vector or an image patch instead
 *     for each layer:
 *         x += o( sub_norm( attention( rope(q), rope(k), v )))     q, k, v of norm(x)
 *         x += down( sub_norm( act(gate) · up ))                   gate, up of norm(x)
 *     logits = head( norm(x) )
 *
 * Attention is in attention.c, the second line of a layer in feed_forward.c, the last line in
 * head.c, and the steps that these are built from in pass.c. Some models have a separate norm
 * before each linear, another before or after each addition to x, no gate, or no head.
 *
 * A row is one token; rows of one call may belong to a prompt or to different texts. Before each
 * ternary linear the rows are quantized to int8, with one scale per row (bitnet/quant.py). Rows
 * that see later positions all come in one call, which may have more rows than the scratch memory.
 */
#include "forward.h"

#include <string.h>

#include "attention.h"
#include "cache.h"
#include "draft.h"
#include "feed_forward.h"
#include "mixture.h"
#include "pass.h"
#include "patches.h"

void bn_embed(const bn_model *m, const bn_stack *stack, int32_t token, float *x) {
    const bn_tensor *t = &stack->embedding;
    const float scale = stack->config.embedding_scale;
    t->encoding->row(&m->kernels, t, (size_t)token, x);
    if (scale != 1.0f)
        for (size_t k = 0; k < t->cols; k++)
            x[k] *= scale;
}

/* x = norm(embedding[token], or the row's vector or patch, + that of its position); also cos and
 * sin of the position, for all layers. */
static void embed_row(bn_pass *p, size_t row) {
    const bn_stack *s = p->stack;
    const bn_row *r = &p->w->rows[row];
    const size_t stride = bn_row_stride(s->config.dim);
    float *x = p->w->x + row * stride;
    if (r->vector)
        memcpy(x, r->vector, s->config.dim * sizeof *x);
    else if (!r->pixels && !r->state)
        bn_embed(p->m, s, r->token, x);
    bn_positions_add(&s->positions, &p->m->kernels, r->position, x, p->w->y + row * stride);
    if (s->embedding_norm.gain)
        bn_norm_checked(p, &s->embedding_norm, x, 0, x, 0, s->config.dim, 1);
    for (size_t table = 0; table < BN_POSITION_TABLES; table++)
        bn_positions_angles(&s->positions, table, r->position,
                            p->w->angle + (row * BN_POSITION_TABLES + table) * s->positions.dim);
}

static void embed_rows(void *context, int32_t thread, size_t first, size_t end) {
    (void)thread;
    for (size_t row = first; row < end; row++)
        embed_row(context, row);
}

static void enter(bn_pass *p, const bn_layer *none) {
    (void)none;
    if (p->stack->patch.data)
        bn_patches(p);
    if (p->stack->join.projection.data)
        bn_draft_enter(p);
    bn_each_row(p, embed_rows, p);
}

/* Compute q, and store k and v in the cache, where other rows may read them. */
static void remember(bn_pass *p, const bn_layer *l) {
    const bn_config *c = &p->stack->config;
    const size_t HE = (size_t)c->n_heads * c->head_dim, GE = (size_t)c->n_kv_heads * c->head_dim;
    const bn_product qkv[] = {{.w = &l->q, .y = p->w->q, .y_stride = bn_row_stride(HE)},
                              {.w = &l->k, .y = p->w->kv, .y_stride = bn_row_stride(2 * GE)},
                              {.w = &l->v, .y = p->w->kv + GE, .y_stride = bn_row_stride(2 * GE)}};

    bn_project(p, &l->attn_norm, qkv, 3); /* q, k, v of norm(x) */
    bn_cache_append(p, l);                /* rope(q); rope(k), v into the cache */
}

static void respond(bn_pass *p, const bn_layer *l) {
    const bn_config *c = &p->stack->config;
    const size_t HE = (size_t)c->n_heads * c->head_dim;

    bn_attention(p, l);                             /* h = attention(q, k, v) */
    bn_quantize_h(p, &l->attn_sub_norm, HE, &l->o); /* sub_norm(h) */
    bn_add(p, &l->o, &l->attn_post_norm);           /* x += o(h) */

    bn_feed_forward(p, &l->ffn); /* x += down(act(gate) · up) */
}

static int stopped(const bn_pass *p) {
    return p->stop && atomic_load(p->stop);
}

/* The stack's own adapter, and those of the rows. Only rows of text have one, not those of a draft
 * or an image. */
static void take_adapters(bn_pass *p) {
    bn_operands *in = &p->w->in;
    in->own = p->stack->own.linears ? &p->stack->own : NULL;
    in->some_adapted = 0;
    for (size_t row = 0; row < p->rows && in->most_rank > 0; row++) {
        in->adapters[row] = p->w->rows[row].adapter;
        in->some_adapted |= in->adapters[row] != NULL;
    }
}

/* Run the first `rows` rows of a view. */
static void run_piece(bn_pass *p, bn_workspace *w, size_t rows, const bn_layer *l, bn_step *step) {
    bn_pass piece = {.m = p->m, .stack = p->stack, .w = w, .rows = rows};
    take_adapters(&piece);
    step(&piece, l);
    if (piece.not_finite)
        bn_fail_pass(p);
}

typedef struct apart {
    bn_pass *p;
    size_t pieces, each; /* rows per piece */
    size_t threads;
    const bn_layer *l;
    bn_step *step;
} apart;

/* The piece of a work item. Later rows of a prompt see more keys, so a thread that starts with the
 * first piece ends with the last. Otherwise adjacent pieces, which may belong to one text, stay
 * together. */
static size_t place_of(const apart *a, size_t item) {
    const int balance = a->p->stack->config.mask == BN_MASK_CAUSAL && a->pieces == 2 * a->threads;
    return !balance ? item : item % 2 == 0 ? item / 2 : a->pieces - 1 - item / 2;
}

static void run_apart(void *context, int32_t thread, size_t first, size_t end) {
    const apart *a = context;
    for (; first < end && !stopped(a->p); first++) {
        const size_t row = place_of(a, first) * a->each;
        bn_workspace w = bn_workspace_part(a->p->w, row, (size_t)thread, a->threads);
        run_piece(a->p, &w, bn_min(a->p->rows - row, a->each), a->l, a->step);
    }
}

/* Rows per piece if each thread runs its own pieces: all threads get the same number, two if
 * possible. 0: too few rows for that. */
static size_t rows_apart(const bn_pass *p, size_t threads) {
    enum { LEAST = 32 };
    const size_t most = bn_workspace_share(p->w, threads), rows = p->rows;
    if (threads == 1 || most < LEAST || rows < threads * LEAST)
        return 0;
    const size_t rounds = rows >= 2 * threads * LEAST ? 2 : 1;
    return bn_div_up(rows, rounds * threads * bn_div_up(rows, most * rounds * threads));
}

void bn_each_piece(bn_pass *p, const bn_layer *l, bn_step *step) {
    const size_t threads = (size_t)bn_pool_threads(p->w->in.pool), each = rows_apart(p, threads);
    if (each > 0) {
        apart a = {p, bn_div_up(p->rows, each), each, threads, l, step};
        bn_pool_run(p->w->in.pool, a.pieces, 1, run_apart, &a);
        return;
    }
    for (size_t row = 0; row < p->rows && !stopped(p); row += p->w->batch) {
        bn_workspace w = bn_workspace_from(p->w, row);
        run_piece(p, &w, bn_min(p->rows - row, w.batch), l, step);
    }
}

/* Run the layers; only the first `answering` layers compute more than keys and values. */
static bn_status run(bn_pass *p, uint32_t answering) {
    const bn_operands *in = &p->w->in;
    memset(in->scratch.skipped, 0, (size_t)bn_pool_threads(in->pool) * sizeof *in->scratch.skipped);
    bn_each_piece(p, NULL, enter);
    for (uint32_t i = 0; i < p->stack->config.n_layers && !stopped(p); i++) {
        const bn_layer *l = &p->stack->layers[i];
        bn_each_piece(p, l, remember); /* for all rows, as the first may attend to the last */
        if (i < answering)
            bn_each_piece(p, l, respond);
    }
    if (stopped(p))
        return BN_ERR_CANCELLED;
    return p->not_finite ? BN_ERR_NUMERIC : BN_OK;
}

bn_status bn_forward(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows,
                     const atomic_int *stop) {
    return run(&(bn_pass){.m = m, .stack = stack, .w = w, .rows = rows, .stop = stop},
               stack->config.n_layers);
}

bn_status bn_forward_keys(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t rows) {
    return run(&(bn_pass){.m = m, .stack = stack, .w = w, .rows = rows},
               stack->config.n_layers - 1);
}
