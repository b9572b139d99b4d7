/* SPDX-License-Identifier: MIT
 *
 * linear.c: y = W·x for every encoding of W, as its row in encodings.c says; many tokens at once by
 * tables of sums where that is faster (lookup.c).
 */
#include "linear.h"

#include "lookup.h"

enum { CHUNK_PANELS = BN_CHUNK_ROWS / BN_PANEL, MOST_PRODUCTS = 3 };

typedef struct group {
    bn_input in;
    const bn_product *products;
} group;

static void run_group(void *context, int32_t thread, size_t first, size_t end) {
    const group *g = context;
    int32_t *acc = g->in.o->acc + (size_t)thread * g->in.o->acc_stride;
    while (first < end) {
        size_t panel, n;
        const bn_product *p = bn_next_part(g->products, &first, end, &panel, &n);
        p->w->encoding->multiply(&g->in, p, panel, n, acc);
    }
}

void bn_linear(const bn_operands *o, size_t first, size_t rows, const bn_product *products,
               int n_products) {
    const bn_input in = {o, first, rows};
    int together = 0; /* before the first that has lines */
    size_t panels = 0;
    for (; together < n_products && products[together].w->encoding->multiply; together++)
        panels += bn_panels(products[together].w);
    const size_t done = bn_linear_lookup(&in, products, together);
    bn_product rest[MOST_PRODUCTS];
    for (int i = 0; i < together; i++) {
        rest[i] = products[i];
        rest[i].y += done * rest[i].y_stride;
    }
    group g = {{o, first + done, rows - done}, rest};
    if (panels > 0 && rows > done)
        bn_pool_run(o->pool, panels, CHUNK_PANELS, run_group, &g);
    for (int i = together; i < n_products; i++)
        products[i].w->encoding->multiply_lines(&in, &products[i]);
}
