/* SPDX-License-Identifier: MIT
 *
 * workspace.c: see workspace.h. A workspace is one allocation.
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

/* Inputs of a linear, for `rows` rows. */
static void lay_out_inputs(const bn_model *m, const bn_stack *stack, bn_operands *in, size_t rows,
                           bn_layout *l) {
    const bn_config *c = &stack->config;
    in->most_rank = bn_most_rank(m, stack);
    in->adapters = in->most_rank > 0 ? bn_piece(l, rows, sizeof *in->adapters) : NULL;
    in->low = bn_piece(l, 2 * rows * BN_GROUP_PRODUCTS * in->most_rank, sizeof(float));
    in->wide =
        bn_max(bn_max(c->dim, c->n_heads * c->head_dim), bn_max(c->ffn_dim, stack->patch.cols));
    in->wide = bn_max(in->wide, stack->draft ? 2 * c->dim : 0);
    in->q_stride = bn_q_row(in->wide) | BN_Q_ALIGN; /* an odd multiple of BN_Q_ALIGN, so that rows
                                                     * do not compete for cache sets */
    in->group_sums_stride = stack->grouped ? bn_div_up(in->wide, BN_SCALE_GROUP_K) : 0;
    in->h = bn_piece(l, rows * in->wide, sizeof(float));
    in->q = bn_piece(l, rows * in->q_stride, 1);
    in->s = bn_piece(l, rows, sizeof(float));
    in->q_sum = bn_piece(l, rows, sizeof(int32_t));
    in->group_sums = bn_piece(l, rows * in->group_sums_stride, sizeof(int32_t));
}

/* Slots have their own inputs, and share the product scratch of `w`. */
static void lay_out_slots(const bn_model *m, const bn_stack *stack, bn_workspace *w, bn_layout *l) {
    const bn_config *c = &stack->config;
    const size_t X = c->n_experts, k = c->experts_per_token;
    const size_t rows = bn_mixture_rows(c, w->batch), taken = bn_mixture_experts(c, rows);
    bn_workspace of_slots = {.batch = rows * k, .in = w->in};
    const size_t threads = (size_t)bn_pool_threads(m->pool);
    bn_slots s = {.rows = rows, .taken = taken};
    s.logits = bn_piece(l, rows * X, sizeof *s.logits);
    s.keys = bn_piece(l, threads * X, sizeof *s.keys);
    s.expert = bn_piece(l, rows * k, sizeof *s.expert);
    s.share = bn_piece(l, rows * k, sizeof *s.share);
    s.slot = bn_piece(l, rows * k, sizeof *s.slot);
    s.row = bn_piece(l, rows * k, sizeof *s.row);
    s.network = bn_piece(l, rows * k, sizeof *s.network);
    s.end = bn_piece(l, threads * X, sizeof *s.end);
    s.groups = bn_piece(l, threads * taken, sizeof *s.groups);
    s.products = bn_piece(l, threads * 2 * taken, sizeof *s.products);
    lay_out_inputs(m, stack, &of_slots.in, rows * k, l);
    of_slots.ffn = bn_piece(l, bn_ffn_floats(c, rows * k), sizeof(float));
    of_slots.y = bn_piece(l, rows * k * c->dim, sizeof(float));
    s.w = bn_piece(l, 1, sizeof *s.w);
    w->slots = bn_piece(l, 1, sizeof *w->slots);
    if (l->base) {
        *s.w = of_slots;
        *w->slots = s;
    }
}

/* Sizes cannot overflow: FORMAT.md §2 bounds every factor, batch <= 4096, n_ctx <= 2^24. */
static void lay_out(const bn_model *m, const bn_stack *stack, bn_workspace *w, bn_layout *l) {
    const bn_config *c = &stack->config, *pooling = stack->pooling ? &stack->pooling->config : c;
    const size_t G = bn_max(c->n_kv_heads, pooling->n_kv_heads);
    const size_t B = w->batch, D = c->dim, F = c->ffn_dim, H = c->n_heads, E = c->head_dim;
    const size_t threads = (size_t)bn_pool_threads(m->pool);
    /* weight rows computed together; the head computes as many at a time */
    const size_t rows = bn_round_up(bn_max(bn_max((H + 2 * G) * E, D), 2 * F), BN_PANEL);
    w->in.lookup_rows = bn_min(rows, BN_LOOKUP_ROWS);
    w->attend_stride =
        bn_round_up(bn_max(bn_attend_floats(c), bn_attend_floats(pooling)), BN_LANES);
    w->room = c->mask == BN_MASK_CAUSAL ? B : bn_max(ROOM, bn_max(B, w->n_ctx));
    w->rows = bn_piece(l, w->room, sizeof *w->rows);
    w->x = bn_piece(l, w->room * D, sizeof(float));
    w->q = bn_piece(l, w->room * H * E, sizeof(float));
    w->angle = bn_piece(l, BN_POSITION_TABLES * w->room * c->rope_dim, sizeof(float));
    lay_out_inputs(m, stack, &w->in, B, l);
    const int tables = m->kernels.products.lookup_tokens > 0 &&
                       B >= m->kernels.products.lookup_tokens * 3 / 4 &&
                       w->in.lookup_rows >= m->kernels.products.lookup_rows &&
                       w->in.wide >= m->kernels.products.lookup_cols;
    w->kv = bn_piece(l, B * 2 * G * E, sizeof(float));
    w->ffn = bn_piece(l, bn_ffn_floats(c, B), sizeof(float));
    w->y = bn_piece(l, B * D, sizeof(float));
    w->in.acc_stride = bn_max(B * BN_CHUNK_ROWS,
                              tables ? m->kernels.products.lookup_tokens * w->in.lookup_rows : 0);
    w->in.acc = bn_piece(l, threads * w->in.acc_stride, sizeof(int32_t));
    w->in.lookup_stride = bn_lookup_bytes(w->in.lookup_rows);
    w->in.lookup = tables ? bn_piece(l, threads * w->in.lookup_stride, 1) : NULL;
    w->attend = bn_piece(l, threads * w->attend_stride, sizeof(float));
    w->partial =
        bn_piece(l, bn_max(bn_partial_floats(c, w->n_ctx), bn_partial_floats(pooling, w->n_ctx)),
                 sizeof(float));
    w->in.skipped = bn_piece(l, threads, sizeof *w->in.skipped);
    w->chunks_done = bn_piece(l, G, sizeof *w->chunks_done);
    w->score_rows = score_rows(stack, B);
    w->scores = bn_piece(l, w->score_rows * c->vocab_size, sizeof(float));
    if (c->n_experts > 0)
        lay_out_slots(m, stack, w, l);
}

size_t bn_workspace_size(const bn_model *m, const bn_stack *stack, size_t batch, size_t n_ctx) {
    bn_workspace w = {.batch = batch, .n_ctx = n_ctx};
    bn_layout l = {0};
    bn_piece(&l, 1, sizeof w);
    lay_out(m, stack, &w, &l);
    return bn_pages_size(l.used);
}

bn_workspace *bn_workspace_new(const bn_model *m, const bn_stack *stack, size_t batch,
                               size_t n_ctx) {
    size_t size = bn_workspace_size(m, stack, batch, n_ctx);
    bn_layout l = {.base = bn_pages_new(&size)};
    if (!l.base)
        return NULL;
    bn_workspace *w = bn_piece(&l, 1, sizeof *w);
    *w = (bn_workspace){.batch = batch,
                        .n_ctx = n_ctx,
                        .in = {.kernels = &m->kernels, .pool = m->pool},
                        .size = size};
    lay_out(m, stack, w, &l);
    if (w->in.lookup)
        memset(w->in.lookup, 0, (size_t)bn_pool_threads(m->pool) * w->in.lookup_stride);
    return w;
}

bn_workspace bn_workspace_from(const bn_workspace *w, const bn_config *c, size_t row) {
    bn_workspace from = *w;
    from.rows += row;
    from.x += row * c->dim;
    from.q += row * c->n_heads * c->head_dim;
    from.angle += row * c->rope_dim;
    return from;
}

/* Operands starting at `row`, with the scratch of one thread that works alone. */
static bn_operands operands_part(const bn_operands *o, size_t row, size_t thread) {
    bn_operands part = *o;
    part.pool = NULL;
    part.h += row * o->wide;
    part.q += row * o->q_stride;
    part.s += row;
    part.q_sum += row;
    part.group_sums += row * o->group_sums_stride;
    part.adapters = o->adapters ? o->adapters + row : NULL;
    part.low += row * 2 * BN_GROUP_PRODUCTS * o->most_rank;
    part.acc += thread * o->acc_stride;
    part.lookup = o->lookup ? o->lookup + thread * o->lookup_stride : NULL;
    part.skipped += thread;
    return part;
}

bn_workspace bn_workspace_alone(const bn_workspace *w, const bn_config *c, size_t row,
                                size_t thread) {
    bn_workspace alone = bn_workspace_from(w, c, row);
    alone.in = operands_part(&w->in, row, thread);
    return alone;
}

size_t bn_workspace_share(const bn_workspace *w, size_t threads) {
    return (w->slots ? bn_min(w->slots->rows, w->batch) : w->batch) / threads;
}

/* What a feed-forward network needs, starting at `row`. */
static bn_workspace network_part(const bn_workspace *w, const bn_config *c, size_t row,
                                 size_t thread) {
    bn_workspace part = *w;
    part.in = operands_part(&w->in, row, thread);
    part.ffn += row * c->ffn_dim;
    part.y += row * c->dim;
    return part;
}

static bn_slots slots_part(const bn_slots *s, const bn_config *c, size_t row, size_t thread) {
    const size_t k = c->experts_per_token, X = c->n_experts;
    bn_slots part = *s;
    part.logits += row * X;
    part.keys += thread * X;
    part.expert += row * k;
    part.share += row * k;
    part.slot += row * k;
    part.row += row * k;
    part.network += row * k;
    part.end += thread * X;
    part.groups += thread * s->taken;
    part.products += thread * s->taken * 2;
    return part;
}

void bn_workspace_part(const bn_workspace *w, const bn_config *c, size_t thread, size_t threads,
                       bn_part *part) {
    const size_t each = bn_workspace_share(w, threads), row = thread * each;
    part->w = network_part(w, c, row, thread);
    part->w.kv += row * 2 * c->n_kv_heads * c->head_dim;
    part->w.attend += thread * w->attend_stride;
    if (!w->slots)
        return;
    part->of_slots = network_part(w->slots->w, c, row * c->experts_per_token, thread);
    part->slots = slots_part(w->slots, c, row, thread);
    part->slots.rows = each;
    part->slots.w = &part->of_slots;
    part->w.slots = &part->slots;
}
