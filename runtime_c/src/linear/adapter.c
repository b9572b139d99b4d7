/* SPDX-License-Identifier: MIT
 *
 * adapter.c: see adapter.h.
 *
 * Items are small blocks, of rows and of what is in or out, so that one row keeps many threads busy
 * as well.
 */
#include "adapter.h"

enum { ROWS = 16, RANKS = 4, LEAST_OUTPUTS = 256, OUTPUTS = 4096 }; /* of an item */

/* Of two kinds: what the model has of its own, and what rows have. */
enum { OWN, OF_ROWS, KINDS };

typedef struct job {
    const bn_operands *o;
    const bn_group *groups;
    size_t n_groups;
    bn_which which;
    int kind;
    int upwards; /* y += outᵀ · t, and not t = in · h */
} job;

/* Where an item is. */
typedef struct place {
    const bn_group *group;
    int product;
    size_t row, rows; /* of the group */
    size_t at;        /* block of ranks, or of outputs */
} place;

static const bn_adapter *adapter_of(const job *j, const bn_group *g, size_t row) {
    return j->kind == OWN ? j->o->own : j->o->adapters[g->first + row];
}

static int is_there(const bn_operands *o, int kind) {
    return kind == OWN ? o->own != NULL : o->some_adapted;
}

enum { LOWS = BN_GROUP_PRODUCTS * KINDS }; /* vectors t of a row */

static float *low_of(const job *j, const place *at, size_t row) {
    const size_t low = (at->group->first + row) * LOWS + (size_t)(at->product * KINDS + j->kind);
    return j->o->low + low * j->o->most_rank;
}

static size_t blocks(size_t n, size_t size) {
    return (n + size - 1) / size;
}

/* Outputs of an item: each thread has one, of whole lines of memory. */
static size_t outputs_of(const bn_operands *o, const bn_tensor *w) {
    const size_t each = blocks(blocks(w->rows, (size_t)bn_pool_threads(o->pool)), 64) * 64;
    return each < LEAST_OUTPUTS ? LEAST_OUTPUTS : each > OUTPUTS ? OUTPUTS : each;
}

static size_t blocks_across(const job *j, const bn_product *p) {
    if (p->w->number == 0)
        return 0;
    return j->upwards ? blocks(p->w->rows, outputs_of(j->o, p->w)) : blocks(j->o->most_rank, RANKS);
}

/* Items of a group; and, if there are more than `item`, which of them that is. */
static size_t find(const job *j, const bn_group *g, size_t item, place *where) {
    const size_t down = blocks(g->rows, ROWS);
    size_t items = 0;
    for (int i = j->which == BN_APART ? g->together : 0;
         i < (j->which == BN_TOGETHER ? g->together : g->n); i++) {
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
    o->kernels->products.f16_matmul(low_of(j, at, row) + rank, LOWS * o->most_rank,
                                    a->linears[w->number].in + rank * w->cols,
                                    a->rank - rank < RANKS ? a->rank - rank : RANKS, w->cols,
                                    o->h + (at->group->first + row) * o->wide, o->wide, n);
}

/* y[row] += outᵀ · t[row] for some outputs of these rows. */
static void raise(const job *j, const place *at, size_t row, size_t n, const bn_adapter *a) {
    const bn_product *p = &at->group->products[at->product];
    const size_t outputs = outputs_of(j->o, p->w), first = at->at * outputs;
    const size_t left = p->w->rows - first;
    j->o->kernels->products.f16_add_rows(&(bn_add_rows){.y = p->y + row * p->y_stride + first,
                                                        .y_stride = p->y_stride,
                                                        .w = a->linears[p->w->number].out + first,
                                                        .w_stride = p->w->rows,
                                                        .rank = a->rank,
                                                        .x = low_of(j, at, row),
                                                        .x_stride = LOWS * j->o->most_rank,
                                                        .weight = p->accumulate ? p->scale : 1,
                                                        .n = left < outputs ? left : outputs,
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
            (j->upwards ? raise : lower)(j, at, row, next - row, a);
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

static size_t count(const job *j) {
    size_t items = 0;
    for (size_t i = 0; i < j->n_groups && is_there(j->o, j->kind); i++)
        items += find(j, &j->groups[i], SIZE_MAX, NULL);
    return items;
}

size_t bn_low_items(const bn_operands *o, const bn_group *groups, size_t n_groups) {
    size_t items = 0;
    for (int kind = 0; kind < KINDS; kind++)
        items += count(&(job){o, groups, n_groups, BN_ALL, kind, 0});
    return items;
}

void bn_lower(const bn_operands *o, const bn_group *groups, size_t n_groups, size_t first,
              size_t end) {
    size_t before = 0;
    for (int kind = 0; kind < KINDS && first < end; kind++) {
        job j = {o, groups, n_groups, BN_ALL, kind, 0};
        const size_t items = count(&j), stop = end < before + items ? end : before + items;
        if (first < stop)
            run_items(&j, 0, first - before, stop - before);
        first = first > stop ? first : stop;
        before += items;
    }
}

void bn_raise(const bn_operands *o, const bn_group *groups, size_t n_groups, bn_which which) {
    for (int kind = 0; kind < KINDS; kind++) {
        job j = {o, groups, n_groups, which, kind, 1};
        const size_t items = count(&j);
        if (items > 0)
            bn_pool_run(o->pool, items, 1, run_items, &j);
    }
}
