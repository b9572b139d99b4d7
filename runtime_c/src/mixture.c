/* SPDX-License-Identifier: MIT
 *
 * mixture.c: see mixture.h.
 *
 * Performance. One row reads the weights of k experts, as many as a dense network of size k·F, in
 * the same two parallel runs: gate and up of all its experts, then down. A prompt of B rows gives
 * an expert B·k/X rows on average, so it is as fast as a dense model with that few rows, plus two
 * more runs, which copy inputs and add results, B·k·D values each.
 */
#include "mixture.h"

#include <string.h>

#include "pass.h"

typedef struct mixture {
    bn_pass *p;
    const bn_ffn *ffn;
    const bn_slots *slots;
    bn_pass of_slots;
} mixture;

/* --- routing --- */

/* Product for the router's logits of rows starting at `i`, from the same quantized input as the
 * experts. */
static bn_product scores(const mixture *m, size_t i) {
    const size_t X = m->ffn->choice.experts;
    return (bn_product){.w = &m->ffn->router, .y = m->slots->logits + i * X, .y_stride = X};
}

static void choose(const mixture *m, int32_t thread, size_t i) {
    const bn_choice *c = &m->ffn->choice;
    const bn_slots *s = m->slots;
    if (!bn_route(&m->p->m->kernels, c, s->logits + i * c->experts,
                  s->keys + (size_t)thread * c->experts, s->expert + i * c->taken,
                  s->share + i * c->taken))
        bn_fail_pass(m->p);
}

static void route_rows(void *context, int32_t thread, size_t first, size_t end) {
    const mixture *m = context;
    const bn_operands *in = &m->p->w->in;
    const size_t D = m->p->stack->config.dim, row = m->p->first + first;
    const bn_product product = scores(m, first);
    bn_quantize_rows(m->p, row, end - first, &m->ffn->norm, m->p->w->x + row * bn_row_stride(D),
                     bn_row_stride(D), D, &m->ffn->router);
    bn_linear_alone(in, thread, row, end - first, &product);
    for (size_t i = first; i < end; i++)
        choose(m, thread, i);
}

/* Each thread routes rows of its own, however few, as each row is a product with the router; for a
 * single row, all share it. */
static void route(mixture *m) {
    bn_pass *p = m->p;
    if (p->rows > 1) {
        bn_pool_run(p->w->in.pool, p->rows, p->rows, route_rows, m);
        return;
    }
    const bn_product product = scores(m, 0);
    bn_quantize_x(p, &m->ffn->norm, &m->ffn->router);
    bn_linear(&p->w->in, p->first, 1, &product, 1);
    choose(m, 0, 0);
}

/* Assign slots to rows: sorted by expert, then by row. */
static void deal(const mixture *m) {
    const bn_slots *s = m->slots;
    const size_t k = m->ffn->choice.taken, X = m->ffn->choice.experts, n = m->p->rows * k;
    const bn_operands *from = &m->p->w->in;
    const bn_operands *to = &m->of_slots.w->in;
    uint32_t sum = 0;
    memset(s->end, 0, X * sizeof *s->end);
    for (size_t i = 0; i < n; i++)
        s->end[s->expert[i]]++;
    for (size_t e = 0; e < X; e++) { /* start of its slots, which advances to their end */
        const uint32_t count = s->end[e];
        s->end[e] = sum;
        sum += count;
    }
    for (size_t i = 0; i < n; i++) {
        const uint32_t slot = s->end[s->expert[i]]++;
        s->slot[i] = slot;
        s->row[slot] = (uint32_t)(m->p->first + i / k);
        s->network[slot] = s->expert[i];
        if (from->most_rank > 0)
            to->adapters[slot] = from->adapters[s->row[slot]];
    }
}

/* --- computing --- */

typedef enum step { FIRST, GATE, UP, DOWN } step; /* FIRST: gate and up together */

static int products_of(const mixture *m, step which, const bn_network *network, size_t slot,
                       bn_product products[2]) {
    const size_t stride = bn_row_stride(m->p->stack->config.dim);
    if (which == DOWN) {
        products[0] =
            (bn_product){.w = &network->down, .y = m->slots->y + slot * stride, .y_stride = stride};
        return 1;
    }
    const int n = bn_ffn_products(&m->of_slots, m->ffn, network, slot, products);
    if (which == UP)
        products[0] = products[n - 1];
    return which == FIRST ? n : 1;
}

static void multiply(const mixture *m, step which) {
    const bn_slots *s = m->slots;
    size_t n = 0, first = 0;
    for (size_t e = 0; e < m->ffn->choice.experts; first = s->end[e++]) {
        if (s->end[e] == first)
            continue;
        bn_product *products = s->products + 2 * n;
        s->groups[n++] =
            (bn_group){.first = first,
                       .rows = s->end[e] - first,
                       .products = products,
                       .n = products_of(m, which, &m->ffn->networks[e], first, products)};
    }
    bn_linear_groups(&m->of_slots.w->in, s->groups, n);
}

/* F32 and F16 weights have no scales, and are multiplied with h. */
static int multiplies_floats(const bn_network *network) {
    return network->up.scale_scope == BN_SCALE_NONE ||
           (network->gate.data && network->gate.scale_scope == BN_SCALE_NONE);
}

/* Copy the inputs of rows to their slots. */
static void copy_rows(void *context, int32_t thread, size_t first, size_t end) {
    const mixture *m = context;
    const bn_operands *from = &m->p->w->in, *to = &m->of_slots.w->in;
    const size_t D = m->p->stack->config.dim;
    (void)thread;
    for (size_t slot = first; slot < end; slot++) {
        const size_t row = m->slots->row[slot];
        memcpy(to->q + slot * to->q_stride, from->q + row * from->q_stride, bn_q_row(D));
        to->s[slot] = from->s[row];
        to->q_sum[slot] = from->q_sum[row];
        memcpy(to->group_sums + slot * to->group_sums_stride,
               from->group_sums + row * from->group_sums_stride,
               to->group_sums_stride * sizeof *to->group_sums);
        if (multiplies_floats(&m->ffn->networks[m->slots->network[slot]]))
            memcpy(to->h + slot * to->wide, from->h + row * from->wide, D * sizeof *to->h);
    }
}

typedef struct own_norms {
    mixture *m;
    step which;
} own_norms;

/* The same, but quantized after the linear's own norm. */
static void norm_rows(void *context, int32_t thread, size_t first, size_t end) {
    const own_norms *a = context;
    mixture *m = a->m;
    const bn_operands *from = &m->p->w->in;
    const bn_norm none = {0};
    (void)thread;
    for (size_t slot = first; slot < end; slot++) {
        const bn_network *network = &m->ffn->networks[m->slots->network[slot]];
        bn_quantize_rows(&m->of_slots, slot, 1, &none, from->h + m->slots->row[slot] * from->wide,
                         0, m->p->stack->config.dim,
                         a->which == GATE ? &network->gate : &network->up);
    }
}

static void normed(mixture *m, step which) {
    bn_each_row(&m->of_slots, norm_rows, &(own_norms){m, which});
    multiply(m, which);
}

static void first_products(mixture *m) {
    if (!m->ffn->networks->up.norm) {
        bn_each_row(&m->of_slots, copy_rows, m);
        multiply(m, FIRST);
        return;
    }
    if (m->ffn->kind == BN_FFN_GATED)
        normed(m, GATE);
    normed(m, UP);
}

/* y = Σ share · expert, then x += norm(y). */
static void sum_rows(void *context, int32_t thread, size_t first, size_t end) {
    const mixture *m = context;
    const bn_slots *s = m->slots;
    const size_t D = m->p->stack->config.dim, stride = bn_row_stride(D), k = m->ffn->choice.taken;
    (void)thread;
    for (size_t i = first; i < end; i++) {
        float *y = m->p->w->y + (m->p->first + i) * stride;
        memset(y, 0, D * sizeof *y);
        for (size_t j = i * k; j < (i + 1) * k; j++)
            m->p->m->kernels.vectors.add(y, s->y + s->slot[j] * stride, s->share[j], D);
    }
    bn_sum_rows(m->p, &m->ffn->post_norm, m->p->first + first, end - first);
}

/* Slots as rows of a workspace, which multiplies them as `w` does its rows. */
static bn_workspace of_slots(const bn_workspace *w) {
    bn_workspace to = {.in = w->slots.in, .gate = w->slots.gate, .up = w->slots.up};
    to.in.kernels = w->in.kernels;
    to.in.pool = w->in.pool;
    to.in.scratch = w->in.scratch;
    to.in.own = w->in.own;
    to.in.some_adapted = w->in.some_adapted;
    return to;
}

static void mix(bn_pass *p, const bn_ffn *ffn) {
    const bn_slots *slots = &p->w->slots;
    bn_workspace w = of_slots(p->w);
    mixture m = {.p = p,
                 .ffn = ffn,
                 .slots = slots,
                 .of_slots = {.m = p->m,
                              .stack = p->stack,
                              .w = &w,
                              .rows = p->rows * ffn->choice.taken,
                              .alone = p->rows == 1}};
    route(&m);
    deal(&m);
    first_products(&m);
    bn_ffn_activate(&m.of_slots, ffn, slots->network);
    multiply(&m, DOWN);
    bn_each_row(p, sum_rows, &m);
    if (m.of_slots.not_finite)
        bn_fail_pass(p);
}

void bn_mixture(bn_pass *p, const bn_ffn *ffn) {
    const size_t first = p->first, rows = p->rows, most = p->w->slots.rows;
    for (size_t done = 0; done < rows; done += most) {
        p->first = first + done;
        p->rows = bn_min(rows - done, most);
        mix(p, ffn);
    }
    p->first = first;
    p->rows = rows;
}
