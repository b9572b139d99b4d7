/* SPDX-License-Identifier: MIT
 *
 * lookup.c: y = W·x for many tokens at once, by tables of sums (ternary_lookup in
 * kernels/products.h).
 *
 * A table serves the rows of a block and is made anew for the next, so blocks are tall and the
 * tokens of a prompt, some at a time, are what threads share first.
 */
#include "lookup.h"

#include "scale.h"

typedef struct job {
    bn_input in;
    const bn_product *products;
    size_t panels, blocks, columns; /* an item is a block of panels by a column of tokens */
} job;

/* Panels [panel, panel + n) of one product for tokens [b, b + tokens). */
static void multiply(const job *j, const bn_product *p, size_t panel, size_t n, size_t b,
                     size_t tokens, int32_t thread) {
    const bn_tensor *t = p->w;
    const bn_operands *o = j->in.o;
    const size_t k_tiles = ((size_t)t->cols + BN_TERNARY_TILE_K - 1) / BN_TERNARY_TILE_K;
    const size_t r0 = panel * BN_PANEL, stride = n * BN_PANEL;
    const size_t end = r0 + stride < t->rows ? r0 + stride : t->rows;
    int32_t *acc = o->acc + (size_t)thread * o->acc_stride;
    j->in.o->kernels->products.ternary_lookup(
        &(bn_matmul){.acc = acc,
                     .acc_stride = stride,
                     .tiles = t->data + panel * k_tiles * BN_TILE_BYTES,
                     .panel_stride = k_tiles * BN_TILE_BYTES,
                     .panels = n,
                     .k_tiles = k_tiles,
                     .q = o->q + (j->in.first + b) * o->q_stride,
                     .q_stride = o->q_stride,
                     .tokens = tokens},
        o->lookup + (size_t)thread * o->lookup_stride);
    for (size_t i = 0; i < tokens; i++)
        for (size_t r = r0; r < end; r += BN_CHUNK_ROWS)
            bn_scale_sums(o, j->in.first + b + i, p, b + i, acc + i * stride + (r - r0), 1, r,
                          end - r < BN_CHUNK_ROWS ? end - r : BN_CHUNK_ROWS);
}

static void run_items(void *context, int32_t thread, size_t item, size_t last) {
    const job *j = context;
    const size_t tokens = j->in.o->kernels->products.lookup_tokens;
    for (; item < last; item++) {
        const size_t b = item % j->columns * tokens;
        const size_t n = j->in.rows - b < tokens ? j->in.rows - b : tokens;
        size_t first, end, panel, panels;
        bn_share(j->panels, (int32_t)(item / j->columns), (int32_t)j->blocks, &first, &end);
        while (first < end) {
            const bn_product *p = bn_next_part(j->products, &first, end, &panel, &panels);
            multiply(j, p, panel, panels, b, n, thread);
        }
    }
}

size_t bn_linear_lookup(const bn_input *in, const bn_product *products, int n_products) {
    const bn_operands *o = in->o;
    const size_t tokens = o->kernels->products.lookup_tokens,
                 threads = (size_t)bn_pool_threads(o->pool);
    const size_t most_panels = o->lookup_rows / BN_PANEL;
    const size_t least_panels = BN_LOOKUP_LEAST_ROWS / BN_PANEL;
    job j = {.in = *in, .products = products};
    if (o->lookup == NULL)
        return 0;
    for (int i = 0; i < n_products; i++) {
        const bn_tensor *t = products[i].w;
        if (!t->encoding->by_tables || t->scale_scope == BN_SCALE_GROUP)
            return 0;
        j.panels += bn_panels(t);
    }
    j.columns = (in->rows + tokens / 4) / tokens; /* the last need not be full to be worth it */
    j.in.rows = in->rows < j.columns * tokens ? in->rows : j.columns * tokens;
    j.blocks = (j.panels + most_panels - 1) / most_panels;
    while (j.blocks * j.columns < 2 * threads && j.panels >= (j.blocks + 1) * least_panels)
        j.blocks++;
    if (j.panels < least_panels || j.blocks * j.columns < threads)
        return 0;
    bn_pool_run(o->pool, j.blocks * j.columns, 1, run_items, &j);
    return j.in.rows;
}
