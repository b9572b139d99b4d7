/* SPDX-License-Identifier: MIT
 *
 * lines.c: y = W·x for matrices stored as lines, skipping the lines that do not matter.
 *
 * After relu² most activations of the feed-forward network are 0, and quantization turns more into
 * 0. Where the gate is not positive, a row of `up` (TERNARY_2BIT_ROWS) is multiplied by 0; where an
 * input of `down` is 0, so is a column of `down` (TERNARY_2BIT_COLUMNS). Integer sums are exact in
 * any order, so skipping these lines does not change a bit of the result. (It would if a scale were
 * so large that `up` overflows where the gate is not positive, and only there.)
 *
 * Tokens are processed one after another: each needs different lines, and together they need fewer
 * multiplications than the whole matrix, on lines that earlier tokens have brought into the cache.
 */
#include "lines.h"

#include <string.h>

#include "scale.h"

enum { BLOCK = 4 * BN_TILE_BYTES, BLOCKS_MOST = 16 }; /* outputs in 64 bytes of a column */

typedef struct job {
    const bn_input *in;
    const bn_product *p;
} job;

static const int8_t *input(const bn_input *in) {
    return in->o->q + in->first * in->o->q_stride;
}

/* Lists the rows of [r0, end) that are needed; without a branch, which could not be predicted. */
static size_t list_rows(uint32_t *list, const float *where, size_t r0, size_t end) {
    size_t n = 0;
    for (size_t r = r0; r < end; r++) {
        list[n] = (uint32_t)r;
        n += !where || where[r] > 0;
    }
    return n;
}

/* Rows [r0, end) of one token, at most BN_LIST_MOST. Returns the bytes skipped. */
static uint64_t multiply_rows(const bn_input *in, const bn_product *p, size_t r0, size_t end) {
    const bn_tensor *t = p->w;
    uint32_t list[BN_LIST_MOST];
    int32_t sum[BN_LIST_MOST], acc[BN_CHUNK_ROWS];
    const bn_lines lines = {.acc = sum,
                            .lines = t->data,
                            .line_bytes = t->bytes / t->rows,
                            .codes = t->cols,
                            .list = list,
                            .n = list_rows(list, p->where, r0, end),
                            .q = input(in)};
    if (lines.n > 0)
        in->o->kernels->products.ternary_rows(&lines);
    const uint64_t left_out = (end - r0 - lines.n) * lines.line_bytes;
    for (size_t i = 0; r0 < end; r0 += BN_CHUNK_ROWS) {
        const size_t n = bn_min(end - r0, BN_CHUNK_ROWS);
        for (size_t r = 0; r < n; r++)
            acc[r] = in->o->q_sum[in->first]; /* means 0: Σq is subtracted (bn_scaling.q_sums) */
        for (; i < lines.n && list[i] < r0 + n; i++)
            acc[list[i] - r0] = sum[i];
        bn_scale_sums(in, p, acc, 0, BN_ONE_MORE, r0, n);
    }
    return left_out;
}

static void run_rows(void *context, int32_t thread, size_t first, size_t end) {
    const job *j = context;
    for (size_t b = 0; b < j->in->rows; b++) {
        const bn_input in = {j->in->o, j->in->first + b, 1};
        const bn_product p = bn_product_from(j->p, b);
        in.o->scratch.skipped[thread] += multiply_rows(&in, &p, first, end);
    }
}

/* Lists the columns of [k0, end) whose input is not 0, and these inputs; returns their number. The
 * list is then padded to a multiple of four. */
static size_t list_columns(uint32_t *list, int8_t *value, const int8_t *q, size_t k0, size_t end) {
    size_t n = 0;
    for (size_t k = k0; k < end; k++) {
        list[n] = (uint32_t)k;
        value[n] = q[k];
        n += q[k] != 0;
    }
    for (size_t i = n; i % 4 != 0; i++) {
        list[i] = list[i - 1];
        value[i] = 0;
    }
    return n;
}

/* Blocks [block, end) of one token, at most BLOCKS_MOST. Returns the bytes skipped. */
static uint64_t multiply_columns(const bn_input *in, const bn_product *p, size_t block,
                                 size_t end) {
    const bn_tensor *t = p->w;
    uint32_t list[BN_LIST_MOST];
    int8_t value[BN_LIST_MOST];
    int32_t acc[BLOCKS_MOST * BLOCK];
    uint64_t lines_read = 0;
    memset(acc, 0, (end - block) * BLOCK * sizeof *acc);
    for (size_t k = 0; k < t->cols; k += BN_LIST_MOST) {
        const size_t stop = bn_min(t->cols, k + BN_LIST_MOST);
        const size_t n = list_columns(list, value, input(in), k, stop);
        const bn_lines lines = {.acc = acc,
                                .lines = t->data + block * BN_TILE_BYTES,
                                .line_bytes = t->bytes / t->cols,
                                .codes = (end - block) * BLOCK,
                                .list = list,
                                .n = bn_round_up(n, 4),
                                .q = value};
        if (lines.n > 0)
            in->o->kernels->products.ternary_columns(&lines);
        lines_read += n;
    }
    const size_t r0 = block * BLOCK, stop = bn_min(end * BLOCK, t->rows);
    bn_scale_sums(in, p, acc, 0, BN_ONE_MORE, r0, stop - r0);
    return (t->cols - lines_read) * (end - block) * BN_TILE_BYTES;
}

/* Items are shares, one per thread, because narrower parts of a column are slow to read. */
static void run_columns(void *context, int32_t thread, size_t share, size_t last_share) {
    const job *j = context;
    const bn_operands *o = j->in->o;
    const size_t blocks = bn_div_up(j->p->w->rows, BLOCK);
    for (; share < last_share; share++) {
        size_t first, end;
        bn_share(blocks, (int32_t)share, bn_pool_threads(o->pool), &first, &end);
        for (size_t b = 0; b < j->in->rows; b++) {
            const bn_input in = {o, j->in->first + b, 1};
            const bn_product p = bn_product_from(j->p, b);
            for (size_t i = first; i < end; i += BLOCKS_MOST)
                o->scratch.skipped[thread] +=
                    multiply_columns(&in, &p, i, bn_min(end, i + BLOCKS_MOST));
        }
    }
}

void bn_multiply_rows(const bn_input *in, const bn_product *p) {
    bn_pool_run(in->o->pool, p->w->rows, BN_LIST_MOST, run_rows, &(job){in, p});
}

void bn_multiply_columns(const bn_input *in, const bn_product *p) {
    bn_pool_run(in->o->pool, (size_t)bn_pool_threads(in->o->pool), 1, run_columns, &(job){in, p});
}
