/* SPDX-License-Identifier: MIT
 *
 * adapter.c: see adapter.h.
 *
 * Work items are small blocks of rows and of ranks or outputs, so that even a single row keeps many
 * threads busy.
 */
#include "adapter.h"

#include "rows.h"

enum { ROWS = 16, RANKS = 4, LEAST_OUTPUTS = 256, OUTPUTS = 4096 }; /* per item */

/* Adapters of two kinds: the model's own, and those of rows. */
enum { OWN, OF_ROWS, KINDS };

typedef struct job {
    const bn_operands *o;
    const bn_group *groups;
    size_t n_groups;
    bn_which which;
    int kind;
    int upwards; /* y += outᵀ · t; otherwise t = in · q */
} job;

/* Position of an item. */
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

enum { LOWS = BN_GROUP_PRODUCTS * KINDS }; /* vectors t per row */

static float *low_of(const job *j, const place *at, size_t row) {
    const size_t low = (at->group->first + row) * LOWS + (size_t)(at->product * KINDS + j->kind);
    return j->o->low + low * j->o->most_rank;
}

/* Outputs of an item, in whole cache lines of codes: one item per thread, within limits. */
static size_t outputs_of(const bn_operands *o, const bn_tensor *w) {
    const size_t each = bn_round_up(bn_div_up(w->rows, (size_t)bn_pool_threads(o->pool)), 64);
    return each < LEAST_OUTPUTS ? LEAST_OUTPUTS : each > OUTPUTS ? OUTPUTS : each;
}

static size_t blocks_across(const job *j, const bn_product *p) {
    if (p->w->number == 0)
        return 0;
    return j->upwards ? bn_div_up(p->w->rows, outputs_of(j->o, p->w))
                      : bn_div_up(j->o->most_rank, RANKS);
}

/* Returns the number of items of a group. If `item` is one of them, *where is set to its
 * position. */
static size_t find(const job *j, const bn_group *g, size_t item, place *where) {
    const size_t down = bn_div_up(g->rows, ROWS);
    size_t items = 0;
    for (int i = j->which == BN_APART ? g->together : 0;
         i < (j->which == BN_TOGETHER ? g->together : g->n); i++) {
        const size_t n = blocks_across(j, &g->products[i]) * down;
        if (item >= items && item < items + n) {
            const size_t row = (item - items) % down * ROWS;
            *where = (place){g, i, row, bn_min(g->rows - row, ROWS), (item - items) / down};
        }
        items += n;
    }
    return items;
}

/* Equally spaced rows of a group that share an adapter. */
typedef struct alike {
    const bn_adapter *adapter;
    size_t row, step, n;
} alike;

/* t[row][r] = in[r] · q[row], times the scale of out[r], for a block of r. */
static void lower(const job *j, const place *at, const alike *to) {
    const bn_operands *o = j->o;
    const size_t cols = at->group->products[at->product].w->cols, rank = at->at * RANKS;
    const bn_low_rank *low = &to->adapter->linears[at->group->products[at->product].w->number];
    const size_t first = at->group->first + to->row;
    const size_t ranks = rank < to->adapter->rank ? bn_min(to->adapter->rank - rank, RANKS) : 0;
    int32_t sums[ROWS * RANKS], q_sums[ROWS];
    if (ranks == 0)
        return;
    for (size_t i = 0; i < to->n; i++)
        q_sums[i] = o->q_sum[first + i * to->step];
    o->kernels->products.int8_rows(&(bn_int8_rows){.acc = sums,
                                                   .acc_stride = RANKS,
                                                   .codes = low->in + rank * bn_int8_row(cols),
                                                   .row_bytes = bn_int8_row(cols),
                                                   .rows = ranks,
                                                   .q = o->q + first * o->q_stride,
                                                   .q_stride = to->step * o->q_stride,
                                                   .q_sums = q_sums,
                                                   .tokens = to->n});
    for (size_t i = 0; i < to->n; i++)
        for (size_t r = 0; r < ranks; r++)
            low_of(j, at, to->row + i * to->step)[rank + r] =
                (float)sums[i * RANKS + r] *
                (low->in_scales[rank + r] / o->s[first + i * to->step]) * low->out_scales[rank + r];
}

/* y[row] += outᵀ · t[row] for a block of outputs. */
static void raise(const job *j, const place *at, const alike *to) {
    const bn_product *p = &at->group->products[at->product];
    const size_t outputs = outputs_of(j->o, p->w), first = at->at * outputs;
    j->o->kernels->products.int8_add_rows(
        &(bn_add_rows){.y = p->y + to->row * p->y_stride + first,
                       .y_stride = to->step * p->y_stride,
                       .w = to->adapter->linears[p->w->number].out + first,
                       .w_stride = bn_int8_row(p->w->rows),
                       .rank = to->adapter->rank,
                       .x = low_of(j, at, to->row),
                       .x_stride = to->step * LOWS * j->o->most_rank,
                       .weight = p->accumulate ? p->scale : 1,
                       .n = bn_min(p->w->rows - first, outputs),
                       .tokens = to->n});
}

/* Rows that share an adapter read it once: neighbours, or equally spaced rows such as every
 * second. */
static void run_item(const job *j, const place *at) {
    const uint32_t number = at->group->products[at->product].w->number;
    uint32_t done = 0;
    for (size_t row = 0; row < at->rows; row++) {
        const bn_adapter *a = adapter_of(j, at->group, at->row + row);
        alike to = {a, at->row + row, 1, 0};
        if (done >> row & 1 || !a || !a->linears[number].in)
            continue;
        while (row + to.step < at->rows && adapter_of(j, at->group, to.row + to.step) != a)
            to.step++;
        for (size_t i = row;
             i < at->rows && !(done >> i & 1) && adapter_of(j, at->group, at->row + i) == a;
             i += to.step, to.n++)
            done |= 1u << i;
        (j->upwards ? raise : lower)(j, at, &to);
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
        const size_t items = count(&j), stop = bn_min(end, before + items);
        if (first < stop)
            run_items(&j, 0, first - before, stop - before);
        first = bn_max(first, stop);
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
