/* SPDX-License-Identifier: MIT
 *
 * workspace.c: see workspace.h. A workspace is one allocation. `lay_out` declares each buffer in
 * one line: whose it is, and how much. Its memory and all views follow from that.
 */
#include "workspace.h"

#include <string.h>

#include "attention.h"
#include "layout.h"
#include "linear/lookup.h"
#include "mixture.h"
#include "model.h"
#include "network.h"
#include "system/pages.h"

enum { SCORE_FLOATS = 1 << 20 };
enum { ROOM = 512 }; /* minimum room for rows of several texts with a non-causal mask */

static size_t score_rows(const bn_stack *stack, size_t batch) {
    const size_t rows = SCORE_FLOATS / bn_max(stack->config.vocab_size, 1);
    return rows < 1 ? 1 : bn_min(rows, batch);
}

/* What a buffer has a part for. A view is shifted by a number of parts of each kind. */
typedef enum owner {
    ROW_OF_PASS,    /* [R] each row that keeps something between steps */
    ROW_OF_STEP,    /* [B, shareable] each row of a step */
    ROW_OF_MIXTURE, /* [slots.rows, shareable] each row of a step that goes through a mixture */
    THREAD,         /* [threads] */
    SHARED,         /* one part for everybody */
    OWNERS
} owner;

typedef struct bn_buffer {
    owner of;
    size_t field;  /* offset of its pointer in the workspace */
    size_t stride; /* bytes of a part */
} bn_buffer;

/* A workspace being laid out. Without memory, pieces and buffers are only counted. */
typedef struct plan {
    bn_layout layout;
    bn_workspace *w;
    bn_buffer *buffers;
    size_t n_buffers;
    size_t parts[OWNERS];
} plan;

static void add_buffer(plan *p, owner of, void *field, size_t stride) {
    void *const start = bn_piece(&p->layout, p->parts[of], stride);
    memcpy(field, &start, sizeof start);
    if (p->buffers)
        p->buffers[p->n_buffers] =
            (bn_buffer){of, (size_t)((uint8_t *)field - (uint8_t *)p->w), stride};
    p->n_buffers++;
}

/* Declare a buffer with `count` elements per part. `pointer`, a field of the workspace, is set
 * here, and in views. */
#define BUFFER(of, pointer, count) add_buffer(p, of, &(pointer), (count) * sizeof *(pointer))

/* Inputs of linears, `each` of them per part of the owner. */
static void lay_out_inputs(plan *p, const bn_model *m, const bn_stack *stack, bn_operands *in,
                           owner of, size_t each) {
    const bn_config *c = &stack->config;
    in->most_rank = bn_most_rank(m, stack);
    if (in->most_rank > 0)
        BUFFER(of, in->adapters, each);
    BUFFER(of, in->low, each * 2 * BN_GROUP_PRODUCTS * in->most_rank);
    in->wide =
        bn_max(bn_max(c->dim, c->n_heads * c->head_dim), bn_max(c->ffn_dim, stack->patch.cols));
    in->wide = bn_max(in->wide, stack->draft ? 2 * c->dim : 0);
    in->q_stride = bn_q_row(in->wide) | BN_Q_ALIGN; /* an odd multiple of BN_Q_ALIGN, so that rows
                                                     * do not compete for cache sets */
    in->group_sums_stride = stack->grouped ? bn_div_up(in->wide, BN_SCALE_GROUP_K) : 0;
    BUFFER(of, in->h, each * in->wide);
    BUFFER(of, in->q, each * in->q_stride);
    BUFFER(of, in->s, each);
    BUFFER(of, in->q_sum, each);
    BUFFER(of, in->group_sums, each * in->group_sums_stride);
}

/* As many rows as threads can share evenly, so that e.g. two threads share 77 rows as two pieces of
 * 39. Threads without a row of their own do not share any. */
static size_t shareable(const plan *p, size_t rows) {
    const size_t threads = p->parts[THREAD];
    return rows < threads ? rows : bn_round_up(rows, threads);
}

/* Slots have their own inputs, and share the product scratch of the workspace. */
static void lay_out_slots(plan *p, const bn_model *m, const bn_stack *stack) {
    const bn_config *c = &stack->config;
    const size_t X = c->n_experts, k = c->experts_per_token;
    bn_slots *s = &p->w->slots;
    s->rows = bn_mixture_rows(c, p->w->batch);
    s->taken = bn_mixture_experts(c, s->rows);
    p->parts[ROW_OF_MIXTURE] = shareable(p, s->rows);
    BUFFER(ROW_OF_MIXTURE, s->logits, X);
    BUFFER(THREAD, s->keys, X);
    BUFFER(ROW_OF_MIXTURE, s->expert, k);
    BUFFER(ROW_OF_MIXTURE, s->share, k);
    BUFFER(ROW_OF_MIXTURE, s->slot, k);
    BUFFER(ROW_OF_MIXTURE, s->row, k);
    BUFFER(ROW_OF_MIXTURE, s->network, k);
    BUFFER(THREAD, s->end, X);
    BUFFER(THREAD, s->groups, s->taken);
    BUFFER(THREAD, s->products, 2 * s->taken);
    lay_out_inputs(p, m, stack, &s->in, ROW_OF_MIXTURE, k);
    BUFFER(ROW_OF_MIXTURE, s->gate, k * bn_row_stride(c->ffn_dim));
    BUFFER(ROW_OF_MIXTURE, s->up, k * bn_row_stride(c->ffn_dim));
    BUFFER(ROW_OF_MIXTURE, s->y, k * bn_row_stride(c->dim));
}

/* Scratch memory to multiply the inputs of the workspace. */
static void lay_out_products(plan *p, const bn_model *m, size_t rows) {
    const bn_product_kernels *kernels = &m->kernels.products;
    const size_t B = p->w->batch;
    bn_product_scratch *scratch = &p->w->in.scratch;
    scratch->lookup_rows = bn_min(rows, BN_LOOKUP_ROWS);
    scratch->lookup_stride = bn_lookup_bytes(scratch->lookup_rows);
    const int tables = kernels->lookup_tokens > 0 && B >= kernels->lookup_tokens * 3 / 4 &&
                       scratch->lookup_rows >= kernels->lookup_rows &&
                       p->w->in.wide >= kernels->lookup_cols;
    scratch->acc_stride =
        bn_max(B * BN_CHUNK_ROWS, tables ? kernels->lookup_tokens * scratch->lookup_rows : 0);
    BUFFER(THREAD, scratch->acc, scratch->acc_stride);
    if (tables)
        BUFFER(THREAD, scratch->lookup, scratch->lookup_stride);
    BUFFER(THREAD, scratch->skipped, 1);
}

/* All buffers. Sizes cannot overflow: FORMAT.md §2 bounds every factor, batch <= 4096,
 * n_ctx <= 2^24. */
static void lay_out(plan *p, const bn_model *m, const bn_stack *stack) {
    const bn_config *c = &stack->config, *pooling = stack->pooling ? &stack->pooling->config : c;
    const size_t G = bn_max(c->n_kv_heads, pooling->n_kv_heads);
    const size_t D = c->dim, F = c->ffn_dim, H = c->n_heads, E = c->head_dim;
    bn_workspace *w = p->w;
    w->room = c->mask == BN_MASK_CAUSAL ? w->batch : bn_max(ROOM, bn_max(w->batch, w->n_ctx));
    p->parts[THREAD] = (size_t)bn_pool_threads(m->pool);
    p->parts[ROW_OF_PASS] = w->room;
    p->parts[ROW_OF_STEP] = shareable(p, w->batch);
    p->parts[SHARED] = 1;
    BUFFER(ROW_OF_PASS, w->rows, 1);
    BUFFER(ROW_OF_PASS, w->x, bn_row_stride(D));
    BUFFER(ROW_OF_PASS, w->q, bn_row_stride(H * E));
    BUFFER(ROW_OF_PASS, w->angle, BN_POSITION_TABLES * c->rope_dim);
    lay_out_inputs(p, m, stack, &w->in, ROW_OF_STEP, 1);
    BUFFER(ROW_OF_STEP, w->kv, bn_row_stride(2 * G * E));
    BUFFER(ROW_OF_STEP, w->gate, bn_row_stride(F));
    BUFFER(ROW_OF_STEP, w->up, bn_row_stride(F));
    BUFFER(ROW_OF_STEP, w->y, bn_row_stride(D));
    /* weight rows computed together; the head computes as many at a time */
    lay_out_products(p, m, bn_round_up(bn_max(bn_max((H + 2 * G) * E, D), 2 * F), BN_PANEL));
    w->attend_stride =
        bn_round_up(bn_max(bn_attend_floats(c), bn_attend_floats(pooling)), BN_LANES);
    BUFFER(THREAD, w->attend, w->attend_stride);
    BUFFER(SHARED, w->partial,
           bn_max(bn_partial_floats(c, w->n_ctx), bn_partial_floats(pooling, w->n_ctx)));
    BUFFER(SHARED, w->chunks_done, G);
    w->score_rows = score_rows(stack, w->batch);
    BUFFER(SHARED, w->scores, w->score_rows * c->vocab_size);
    if (c->n_experts > 0)
        lay_out_slots(p, m, stack);
}

/* The buffers, and the bytes that they take with the workspace itself. */
static plan measure(const bn_model *m, const bn_stack *stack, size_t batch, size_t n_ctx) {
    bn_workspace w = {.batch = batch, .n_ctx = n_ctx};
    plan p = {.w = &w};
    bn_piece(&p.layout, 1, sizeof w);
    lay_out(&p, m, stack);
    bn_piece(&p.layout, p.n_buffers, sizeof *p.buffers);
    p.w = NULL;
    return p;
}

size_t bn_workspace_size(const bn_model *m, const bn_stack *stack, size_t batch, size_t n_ctx) {
    return bn_pages_size(measure(m, stack, batch, n_ctx).layout.used);
}

bn_workspace *bn_workspace_new(const bn_model *m, const bn_stack *stack, size_t batch,
                               size_t n_ctx) {
    const plan needed = measure(m, stack, batch, n_ctx);
    size_t size = bn_pages_size(needed.layout.used);
    plan p = {.layout.base = bn_pages_new(&size)};
    if (!p.layout.base)
        return NULL;
    bn_workspace *w = p.w = bn_piece(&p.layout, 1, sizeof *w);
    p.buffers = bn_piece(&p.layout, needed.n_buffers, sizeof *p.buffers);
    *w = (bn_workspace){.batch = batch,
                        .n_ctx = n_ctx,
                        .in = {.kernels = &m->kernels, .pool = m->pool},
                        .buffers = p.buffers,
                        .n_buffers = needed.n_buffers,
                        .size = size};
    lay_out(&p, m, stack);
    const bn_product_scratch *scratch = &w->in.scratch;
    if (scratch->lookup)
        memset(scratch->lookup, 0, p.parts[THREAD] * scratch->lookup_stride);
    return w;
}

/* --- views --- */

#define NOT_IN_VIEW SIZE_MAX /* instead of a number of parts: the pointers are NULL */

static bn_workspace view(const bn_workspace *w, const size_t by[OWNERS]) {
    bn_workspace to = *w;
    for (const bn_buffer *b = w->buffers; b < w->buffers + w->n_buffers; b++) {
        uint8_t *field = (uint8_t *)&to + b->field, *start;
        memcpy(&start, field, sizeof start);
        start = by[b->of] == NOT_IN_VIEW ? NULL : start + by[b->of] * b->stride;
        memcpy(field, &start, sizeof start);
    }
    return to;
}

bn_workspace bn_workspace_from(const bn_workspace *w, size_t row) {
    return row == 0 ? *w : view(w, (const size_t[OWNERS]){[ROW_OF_PASS] = row});
}

bn_workspace bn_workspace_alone(const bn_workspace *w, size_t row, size_t thread) {
    bn_workspace alone = view(w, (const size_t[OWNERS]){[ROW_OF_PASS] = row,
                                                        [ROW_OF_STEP] = row,
                                                        [ROW_OF_MIXTURE] = NOT_IN_VIEW,
                                                        [THREAD] = thread,
                                                        [SHARED] = NOT_IN_VIEW});
    alone.in.pool = NULL;
    return alone;
}

size_t bn_workspace_share(const bn_workspace *w, size_t threads) {
    return bn_div_up(w->slots.rows > 0 ? w->slots.rows : w->batch, threads);
}

bn_workspace bn_workspace_part(const bn_workspace *w, size_t row, size_t thread, size_t threads) {
    const size_t each = bn_workspace_share(w, threads);
    bn_workspace part = view(w, (const size_t[OWNERS]){[ROW_OF_PASS] = row,
                                                       [ROW_OF_STEP] = thread * each,
                                                       [ROW_OF_MIXTURE] = thread * each,
                                                       [THREAD] = thread,
                                                       [SHARED] = NOT_IN_VIEW});
    part.batch = each;
    part.slots.rows = bn_min(w->slots.rows, each);
    part.in.pool = NULL;
    return part;
}
