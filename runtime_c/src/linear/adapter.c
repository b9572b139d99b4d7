/* SPDX-License-Identifier: MIT
 *
 * adapter.c: see adapter.h.
 *
 * Two runs of the threads: t = in · h of all products and rows, then y += outᵀ · t. Items are small
 * blocks, of rows and of what is in or out, so that one row keeps many threads busy as well.
 */
#include "adapter.h"

enum { ROWS = 16, RANKS = 4, OUTPUTS = 512 }; /* of an item */

typedef struct job {
    const bn_operands *o;
    const bn_group *groups;
    const bn_adapter *own; /* of the model; NULL: those of the rows */
    size_t n_groups;
    bn_which which;
    int second;
} job;

/* Where an item is. */
typedef struct place {
    const bn_group *group;
    int product;
    size_t row, rows; /* of the group */
    size_t at;        /* block of ranks, or of outputs */
} place;

/* The adapter of a row of a group. */
static const bn_adapter *adapter_of(const job *j, const bn_group *g, size_t row) {
    return j->own ? j->own : j->o->adapters[g->first + row];
}

static float *low_of(const job *j, const bn_group *g, size_t row, int product) {
    return j->o->low + ((g->first + row) * BN_GROUP_PRODUCTS + (size_t)product) * j->o->most_rank;
}

static size_t blocks(size_t n, size_t size) {
    return (n + size - 1) / size;
}

static size_t blocks_across(const job *j, const bn_product *p) {
    if (p->w->number == 0)
        return 0;
    return j->second ? blocks(p->w->rows, OUTPUTS) : blocks(j->o->most_rank, RANKS);
}

static int first_product(const job *j, const bn_group *g) {
    return j->which == BN_TOGETHER ? 0 : g->together;
}

static int end_product(const job *j, const bn_group *g) {
    return j->which == BN_TOGETHER ? g->together : g->n;
}

/* Items of a group; and, if there are more than `item`, which of them that is. */
static size_t find(const job *j, const bn_group *g, size_t item, place *where) {
    const size_t down = blocks(g->rows, ROWS);
    size_t items = 0;
    for (int i = first_product(j, g); i < end_product(j, g); i++) {
        const size_t n = blocks_across(j, &g->products[i]) * down;
        if (item >= items && item < items + n) {
            const size_t row = (item - items) % down * ROWS, left = g->rows - row;
            *where = (place){g, i, row, left < ROWS ? left : ROWS, (item - items) / down};
        }
        items += n;
    }
    return items;
}

/* t[row][r] = in[r] · h[row] for some r of n rows with one adapter. */
static void lower(const job *j, const place *at, size_t row, size_t n, const bn_adapter *a) {
    const bn_operands *o = j->o;
    const bn_tensor *w = at->group->products[at->product].w;
    const size_t rank = at->at * RANKS;
    if (rank >= a->rank)
        return;
    o->kernels->products.f16_matmul(
        low_of(j, at->group, row, at->product) + rank, BN_GROUP_PRODUCTS * o->most_rank,
        a->linears[w->number].in + rank * w->cols, a->rank - rank < RANKS ? a->rank - rank : RANKS,
        w->cols, o->h + (at->group->first + row) * o->wide, o->wide, n);
}

/* y[row] += outᵀ · t[row] for some outputs of these rows. */
static void raise(const job *j, const place *at, size_t row, size_t n, const bn_adapter *a) {
    const bn_product *p = &at->group->products[at->product];
    const size_t first = at->at * OUTPUTS, left = p->w->rows - first;
    j->o->kernels->products.f16_add_rows(
        &(bn_add_rows){.y = p->y + row * p->y_stride + first,
                       .y_stride = p->y_stride,
                       .w = a->linears[p->w->number].out + first,
                       .w_stride = p->w->rows,
                       .rank = a->rank,
                       .x = low_of(j, at->group, row, at->product),
                       .x_stride = BN_GROUP_PRODUCTS * j->o->most_rank,
                       .weight = p->accumulate ? p->scale : 1,
                       .n = left < OUTPUTS ? left : OUTPUTS,
                       .tokens = n});
}

/* Neighbours that have the same adapter go together. */
static void run_item(const job *j, const place *at) {
    const uint32_t number = at->group->products[at->product].w->number;
    const size_t end = at->row + at->rows;
    for (size_t row = at->row, next; row < end; row = next) {
        const bn_adapter *a = adapter_of(j, at->group, row);
        for (next = row + 1; next < end && adapter_of(j, at->group, next) == a; next++)
            ;
        if (a && a->linears[number].in)
            (j->second ? raise : lower)(j, at, row, next - row, a);
    }
}

static void run_items(void *context, int32_t thread, size_t first, size_t end) {
    const job *j = context;
    size_t before = 0;
    (void)thread;
    for (const bn_group *g = j->groups; first < end && g < j->groups + j->n_groups; g++) {
        place at = {0};
        const size_t items = find(j, g, SIZE_MAX, &at);
        for (; first < end && first < before + items; first++) {
            find(j, g, first - before, &at);
            run_item(j, &at);
        }
        before += items;
    }
}

static void add(job j) {
    for (j.second = 0; j.second < 2; j.second++) {
        size_t items = 0;
        for (size_t i = 0; i < j.n_groups; i++)
            items += find(&j, &j.groups[i], SIZE_MAX, NULL);
        if (items > 0)
            bn_pool_run(j.o->pool, items, 1, run_items, &j);
    }
}

void bn_adapt(const bn_operands *o, const bn_group *groups, size_t n_groups, bn_which which) {
    job j = {.o = o, .groups = groups, .n_groups = n_groups, .which = which};
    if ((j.own = o->own))
        add(j);
    j.own = NULL;
    if (o->some_adapted)
        add(j);
}
