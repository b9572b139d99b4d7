/* SPDX-License-Identifier: MIT
 *
 * linear.c: y = W·x for every encoding of W, according to its row in encodings.c; many tokens at
 * once by lookup tables where that is faster (lookup.c).
 */
#include "linear.h"

#include "adapter.h"
#include "lookup.h"

/* UNIT_PANELS: panels that kernels multiply together if there are several rows; threads take no
 * fewer. */
enum { UNIT_PANELS = 4 };
/* ALONE: weight bytes times rows; they take less than a microsecond, and waking threads more. */
enum { ALONE = 1 << 16 };

typedef struct job {
    const bn_operands *o;
    const bn_group *groups;
    size_t n_groups;
    size_t low; /* adapter items, which come first */
} job;

/* Panels of an item. A single row is no slower with one. */
static size_t unit_of(const bn_group *g) {
    return g->rows - g->done > 1 ? UNIT_PANELS : 1;
}

static void run_panels(void *context, int32_t thread, size_t item, size_t last) {
    const job *j = context;
    int32_t *acc = j->o->scratch.acc + (size_t)thread * j->o->scratch.acc_stride;
    if (item < j->low) {
        const size_t end = bn_min(last, j->low);
        bn_lower(j->o, j->groups, j->n_groups, item, end);
        item = end;
    }
    while (item < last) {
        const bn_group *g = bn_group_of(j->groups, j->n_groups, item);
        const bn_input in = {j->o, g->first + g->done, g->rows - g->done};
        const size_t unit = unit_of(g), stop = bn_min((last - g->before) * unit, g->panels);
        size_t first = (item - g->before) * unit, panel, n;
        while (first < stop) {
            const size_t end = bn_min(first + BN_CHUNK_PANELS, stop);
            const bn_product *all = bn_next_part(g->products, &first, end, &panel, &n);
            const bn_product p = bn_product_from(all, g->done);
            p.w->encoding->multiply(&in, &p, panel, n, acc);
        }
        item = g->before + bn_div_up(stop, unit);
    }
}

/* Bytes of the matrices still to be multiplied, counted once per row. */
static size_t work_of(const bn_group *groups, size_t n_groups) {
    size_t bytes = 0;
    for (const bn_group *g = groups; g < groups + n_groups; g++)
        for (int i = 0; i < g->together; i++)
            bytes += (g->rows - g->done) * (size_t)g->products[i].w->bytes;
    return bytes;
}

void bn_linear_groups(const bn_operands *o, bn_group *groups, size_t n_groups) {
    for (bn_group *g = groups; g < groups + n_groups; g++) {
        g->panels = 0;
        for (g->together = 0; g->together < g->n; g->together++) {
            if (!g->products[g->together].w->encoding->multiply)
                break;
            g->panels += bn_panels(g->products[g->together].w);
        }
    }
    bn_linear_lookup(o, groups, n_groups);
    const size_t low = bn_low_items(o, groups, n_groups);
    size_t items = low;
    for (bn_group *g = groups; g < groups + n_groups; g++) {
        g->before = items;
        items += g->rows > g->done ? bn_div_up(g->panels, unit_of(g)) : 0;
    }
    job j = {o, groups, n_groups, low};
    if (low == 0 && work_of(groups, n_groups) <= ALONE)
        run_panels(&j, 0, 0, items);
    else
        bn_pool_run(o->pool, items, BN_CHUNK_PANELS, run_panels, &j);
    bn_raise(o, groups, n_groups, BN_TOGETHER); /* lines may read these (bn_product.where) */
    for (bn_group *g = groups; g < groups + n_groups; g++)
        for (const bn_product *p = g->products + g->together; p < g->products + g->n; p++)
            p->w->encoding->multiply_lines(&(bn_input){o, g->first, g->rows}, p);
    bn_raise(o, groups, n_groups, BN_APART);
}

void bn_linear(const bn_operands *o, size_t first, size_t rows, const bn_product *products,
               int n_products) {
    bn_group group = {.first = first, .rows = rows, .products = products, .n = n_products};
    bn_linear_groups(o, &group, 1);
}

void bn_linear_alone(const bn_operands *o, int32_t thread, size_t first, size_t rows,
                     const bn_product *product) {
    const bn_input in = {o, first, rows};
    const size_t panels = bn_panels(product->w);
    int32_t *acc = o->scratch.acc + (size_t)thread * o->scratch.acc_stride;
    for (size_t panel = 0; panel < panels; panel += BN_CHUNK_PANELS) {
        const size_t n = bn_min(panels - panel, BN_CHUNK_PANELS);
        product->w->encoding->multiply(&in, product, panel, n, acc);
    }
}
