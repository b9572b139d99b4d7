/* SPDX-License-Identifier: MIT
 *
 * lookup.c: y = W·x for many tokens at once by lookup tables of sums (ternary_lookup in
 * kernels/products.h).
 *
 * A table serves all rows of a block and is rebuilt for the next block, so blocks are tall, and the
 * threads split the tokens of a prompt first.
 */
#include "lookup.h"

#include "scale.h"
#include "tiles.h"

/* An item is a block of a group's panels times a column of its tokens. */
typedef struct job {
    const bn_operands *o;
    const bn_group *groups;
    size_t n_groups;
} job;

/* Panels [panel, panel + n) of one product. */
static void multiply(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                     int32_t thread) {
    const bn_operands *o = in->o;
    const bn_tensor *t = p->w;
    const size_t r0 = panel * BN_PANEL;
    int32_t *acc = o->scratch.acc + (size_t)thread * o->scratch.acc_stride;
    bn_matmul mm = bn_tiles_of(in, t, BN_TERNARY_TILE_K, panel, n, acc);
    mm.acc_stride = n * BN_PANEL;
    o->kernels->products.ternary_lookup(&mm, o->scratch.lookup +
                                                 (size_t)thread * o->scratch.lookup_stride);
    bn_scale_sums(in, p, acc, mm.acc_stride, BN_ONE_MORE, r0, bn_rows_of(t, r0, n));
}

static void run_items(void *context, int32_t thread, size_t item, size_t last) {
    const job *j = context;
    const size_t most = j->o->kernels->products.lookup_tokens;
    for (; item < last; item++) {
        const bn_group *g = bn_group_of(j->groups, j->n_groups, item);
        const size_t at = item - g->before, b = at % g->columns * most;
        const bn_input in = {j->o, g->first + b, bn_min(g->done - b, most)};
        size_t first, end, panel, panels;
        bn_share(g->panels, (int32_t)(at / g->columns), (int32_t)g->blocks, &first, &end);
        while (first < end) {
            const bn_product *all = bn_next_part(g->products, &first, end, &panel, &panels);
            const bn_product p = bn_product_from(all, b);
            multiply(&in, &p, panel, panels, thread);
        }
    }
}

static int has_tables(const bn_operands *o, const bn_group *g) {
    for (int i = 0; i < g->together; i++)
        if (!g->products[i].w->encoding->by_tables ||
            g->products[i].w->cols < o->kernels->products.lookup_cols ||
            g->products[i].w->scale_scope == BN_SCALE_GROUP)
            return 0;
    return g->panels >= o->kernels->products.lookup_rows / BN_PANEL;
}

/* Splits a group into as few items as possible; returns their number, 0 if tables do not pay
 * off. */
static size_t cut(const bn_operands *o, bn_group *g) {
    const size_t tokens = o->kernels->products.lookup_tokens;
    const size_t most_panels = o->scratch.lookup_rows / BN_PANEL;
    g->blocks = g->columns = 0;
    if (!has_tables(o, g))
        return 0;
    g->columns = (g->rows + tokens / 4) / tokens; /* the last one pays off from 3/4 full */
    g->blocks = bn_div_up(g->panels, most_panels);
    return g->blocks * g->columns;
}

void bn_linear_lookup(const bn_operands *o, bn_group *groups, size_t n_groups) {
    const size_t threads = (size_t)bn_pool_threads(o->pool);
    const size_t least_panels = o->kernels->products.lookup_rows / BN_PANEL;
    bn_group *const end = groups + n_groups;
    size_t items = 0, before = SIZE_MAX;
    for (bn_group *g = groups; g < end; g++) {
        g->done = 0;
        items += o->scratch.lookup ? cut(o, g) : 0;
    }
    while (items > 0 && items < 2 * threads && items != before) { /* shorter blocks */
        before = items;
        for (bn_group *g = groups; g < end && items < 2 * threads; g++)
            if (g->columns > 0 && g->panels >= (g->blocks + 1) * least_panels) {
                g->blocks++;
                items += g->columns;
            }
    }
    if (items == 0 || items < threads)
        return;
    items = 0;
    for (bn_group *g = groups; g < end; g++) {
        g->done = bn_min(g->rows, g->columns * o->kernels->products.lookup_tokens);
        g->before = items;
        items += g->blocks * g->columns;
    }
    bn_pool_run(o->pool, items, 1, run_items, &(job){o, groups, n_groups});
}
