/* SPDX-License-Identifier: MIT
 *
 * linear.c: y = W·x for every encoding of W. The integer sums come from the kernels; turning
 * them into floats is here, once, so that all tiers share it. Two cases have files of their own:
 * many tokens at once (lookup.c), and matrices stored as lines (lines.c).
 */
#include <string.h>

#include "internal.h"

enum { CHUNK_PANELS = BN_CHUNK_ROWS / BN_PANEL, MOST_PRODUCTS = 3 };

typedef struct group {
    const bn_model *m;
    const bn_workspace *w;
    const bn_product *products;
    size_t first, rows; /* rows of the workspace */
} group;

/* Put n finished values of row b into place, output rows r0 on, unless they are there. */
static void emit(const bn_product *p, size_t b, size_t r0, size_t n, float *value) {
    float *y = p->y + b * p->y_stride + r0;
    if (p->w->bias)
        for (size_t r = 0; r < n; r++)
            value[r] += p->w->bias[r0 + r];
    if (p->accumulate)
        for (size_t r = 0; r < n; r++)
            y[r] += value[r] * p->scale;
    else if (value != y)
        memcpy(y, value, n * sizeof *y);
}

void bn_scale_sums(const bn_workspace *w, size_t row, const bn_product *p, size_t b,
                   const int32_t *acc, int32_t offset, size_t r0, size_t n) {
    const bn_tensor *t = p->w;
    const int32_t correction = offset * w->q_sum[row];
    const float s = w->s[row];
    float sum[BN_CHUNK_ROWS], *value = p->accumulate ? sum : p->y + b * p->y_stride + r0;
    if (t->scale_scope == BN_SCALE_TENSOR) {
        const float factor = t->scales[0] / s;
        for (size_t r = 0; r < n; r++)
            value[r] = (float)(acc[r] - correction) * factor;
    } else {
        for (size_t r = 0; r < n; r++)
            value[r] = (float)(acc[r] - correction) * (t->scales[r0 + r] / s);
    }
    emit(p, b, r0, n, value);
}

static void scale_sums(const group *g, const bn_product *p, const int32_t *acc, int32_t offset,
                       size_t r0, size_t n) {
    for (size_t b = 0; b < g->rows; b++, acc += BN_CHUNK_ROWS)
        bn_scale_sums(g->w, g->first + b, p, b, acc, offset, r0, n);
}

/* Ternary with one scale per 128 inputs: y = v/s, v the kernel's sum over the groups. */
static void ternary_groups(const group *g, const bn_product *p, size_t panel, size_t n, float *v) {
    const bn_tensor *t = p->w;
    const bn_workspace *w = g->w;
    const size_t k_tiles = ((size_t)t->cols + BN_TERNARY_TILE_K - 1) / BN_TERNARY_TILE_K;
    const size_t n_groups = (k_tiles + BN_GROUP_TILES - 1) / BN_GROUP_TILES;
    const size_t r0 = panel * BN_PANEL;
    const size_t rows = r0 + n * BN_PANEL <= t->rows ? n * BN_PANEL : t->rows - r0;
    g->m->kernels.products.ternary_grouped(
        &(bn_grouped){.y = v,
                      .y_stride = BN_CHUNK_ROWS,
                      .tiles = t->data + panel * k_tiles * BN_TILE_BYTES,
                      .scales = t->group_scales + r0 * n_groups,
                      .panels = n,
                      .k_tiles = k_tiles,
                      .q = w->q + g->first * w->q_stride,
                      .q_stride = w->q_stride,
                      .q_sums = w->group_sums + g->first * w->group_sums_stride,
                      .q_sums_stride = w->group_sums_stride,
                      .tokens = g->rows});
    for (size_t b = 0; b < g->rows; b++, v += BN_CHUNK_ROWS) {
        for (size_t r = 0; r < rows; r++)
            v[r] /= w->s[g->first + b];
        emit(p, b, r0, rows, v);
    }
}

void bn_sum_groups(const bn_workspace *w, size_t row, size_t width) {
    const int8_t *q = w->q + row * w->q_stride;
    int32_t *sums = w->group_sums + row * w->group_sums_stride;
    for (size_t k = 0; k < width; k += BN_SCALE_GROUP_K) {
        const size_t end = width - k < BN_SCALE_GROUP_K ? width : k + BN_SCALE_GROUP_K;
        int32_t sum = 0;
        for (size_t i = k; i < end; i++)
            sum += q[i];
        *sums++ = sum;
    }
}

static void sum_int8_rows(const group *g, const bn_tensor *t, size_t r0, size_t n, int32_t *acc) {
    const size_t row_bytes = bn_int8_row(t->cols);
    g->m->kernels.products.int8_rows(
        &(bn_int8_rows){.acc = acc,
                        .acc_stride = BN_CHUNK_ROWS,
                        .codes = (const int8_t *)t->data + r0 * row_bytes,
                        .row_bytes = row_bytes,
                        .rows = n,
                        .q = g->w->q + g->first * g->w->q_stride,
                        .q_stride = g->w->q_stride,
                        .q_sums = g->w->q_sum + g->first,
                        .tokens = g->rows});
}

/* Panels [panel, panel + n) of one product, n·16 <= BN_CHUNK_ROWS. */
static void chunk(const group *g, const bn_product *p, size_t panel, size_t n, int32_t *acc) {
    const bn_tensor *t = p->w;
    const bn_kernels *k = &g->m->kernels;
    const size_t r0 = panel * BN_PANEL;
    const size_t rows = r0 + n * BN_PANEL <= t->rows ? n * BN_PANEL : t->rows - r0;
    const size_t tile_k = t->encoding == BN_TERNARY_5TRIT ? BN_TRIT_TILE_K : BN_TERNARY_TILE_K;
    const size_t k_tiles = (t->cols + tile_k - 1) / tile_k;
    const bn_matmul mm = {.acc = acc,
                          .acc_stride = BN_CHUNK_ROWS,
                          .tiles = t->data + panel * k_tiles * BN_TILE_BYTES,
                          .panel_stride = k_tiles * BN_TILE_BYTES,
                          .panels = n,
                          .k_tiles = k_tiles,
                          .q = g->w->q + g->first * g->w->q_stride,
                          .q_stride = g->w->q_stride,
                          .tokens = g->rows};
    if (t->encoding == BN_TERNARY_2BIT && t->scale_scope == BN_SCALE_GROUP) {
        ternary_groups(g, p, panel, n, (float *)acc);
    } else if (t->encoding == BN_TERNARY_2BIT) {
        k->products.ternary_matmul(&mm);
        scale_sums(g, p, acc, 1, r0, rows);
    } else if (t->encoding == BN_TERNARY_5TRIT) {
        k->products.trit_matmul(&mm);
        scale_sums(g, p, acc, 1, r0, rows);
    } else if (bn_is_int8(t)) {
        sum_int8_rows(g, t, r0, rows, acc);
        scale_sums(g, p, acc, 0, r0, rows);
    } else {
        float *y = (float *)acc; /* same size, same owner */
        const float *x = g->w->h + g->first * g->w->wide;
        if (t->encoding == BN_F16)
            k->products.f16_matmul(y, BN_CHUNK_ROWS, (const uint16_t *)t->data + r0 * t->cols, rows,
                                   t->cols, x, g->w->wide, g->rows);
        else
            k->products.f32_matmul(y, BN_CHUNK_ROWS, (const float *)t->data + r0 * t->cols, rows,
                                   t->cols, x, g->w->wide, g->rows);
        for (size_t b = 0; b < g->rows; b++)
            emit(p, b, r0, rows, y + b * BN_CHUNK_ROWS);
    }
}

const bn_product *bn_next_part(const bn_product *p, size_t *first, size_t end, size_t *panel,
                               size_t *n) {
    for (*panel = *first; *panel >= bn_panels(p->w); p++)
        *panel -= bn_panels(p->w);
    const size_t left = bn_panels(p->w) - *panel;
    *n = end - *first < left ? end - *first : left;
    *first += *n;
    return p;
}

static void run_group(void *context, int32_t thread, size_t first, size_t end) {
    const group *g = context;
    int32_t *acc = g->w->acc + (size_t)thread * g->w->acc_stride;
    while (first < end) {
        size_t panel, n;
        const bn_product *p = bn_next_part(g->products, &first, end, &panel, &n);
        chunk(g, p, panel, n, acc);
    }
}

void bn_linear(const bn_model *m, const bn_workspace *w, size_t first, size_t rows,
               const bn_product *products, int n_products) {
    int together = 0; /* before the first that has lines */
    size_t panels = 0;
    for (; together < n_products && !bn_has_lines(products[together].w); together++)
        panels += bn_panels(products[together].w);
    const size_t done = bn_linear_lookup(m, w, first, rows, products, together);
    bn_product rest[MOST_PRODUCTS];
    for (int i = 0; i < together; i++) {
        rest[i] = products[i];
        rest[i].y += done * rest[i].y_stride;
    }
    group g = {m, w, rest, first + done, rows - done};
    if (panels > 0 && rows > done)
        bn_pool_run(m->pool, panels, CHUNK_PANELS, run_group, &g);
    for (int i = together; i < n_products; i++)
        bn_linear_lines(m, w, first, rows, &products[i]);
}

void bn_linear_int8_row(const bn_model *m, const bn_workspace *w, const bn_product *product,
                        size_t row) {
    int32_t sum;
    sum_int8_rows(&(group){m, w, product, 0, 1}, product->w, row, 1, &sum);
    bn_scale_sums(w, 0, product, 0, &sum, 0, row, 1);
}

/* One row: codes are -1, 0, 1 and a product with the scale is exact. */
static void embed_ternary(const bn_model *m, const bn_tensor *t, size_t row, float *x) {
    const size_t panel = row / BN_PANEL, dim = t->cols;
    const size_t tiles = (dim + BN_TERNARY_TILE_K - 1) / BN_TERNARY_TILE_K;
    const size_t n_groups = (tiles + BN_GROUP_TILES - 1) / BN_GROUP_TILES;
    const uint8_t *tile = t->data + panel * tiles * BN_TILE_BYTES + row % BN_PANEL * 4;
    float scale = t->scale_scope == BN_SCALE_TENSOR ? t->scales[0]
                  : t->scale_scope == BN_SCALE_ROW  ? t->scales[row]
                                                    : 0;
    for (size_t k = 0; k < dim; k++) {
        const size_t byte = k / BN_TERNARY_TILE_K * BN_TILE_BYTES + k % 4, field = k % 16 / 4;
        if (t->scale_scope == BN_SCALE_GROUP && k % BN_SCALE_GROUP_K == 0) {
            const size_t at = (panel * n_groups + k / BN_SCALE_GROUP_K) * BN_PANEL;
            m->kernels.bytes.f16_to_f32(&scale, t->group_scales + at + row % BN_PANEL, 1);
        }
        x[k] = (float)((tile[byte] >> 2 * field & 3) - 1) * scale;
    }
}

void bn_embed(const bn_model *m, int32_t token, float *x) {
    const bn_tensor *t = &m->embedding;
    const size_t row = (size_t)token, dim = t->cols;
    if (t->encoding == BN_F16) {
        m->kernels.bytes.f16_to_f32(x, (const uint16_t *)t->data + row * dim, dim);
    } else if (t->encoding == BN_F32) {
        memcpy(x, (const float *)t->data + row * dim, dim * sizeof *x);
    } else if (t->encoding == BN_TERNARY_2BIT) {
        embed_ternary(m, t, row, x);
    } else {
        const int8_t *codes = (const int8_t *)t->data + row * bn_int8_row(dim);
        for (size_t k = 0; k < dim; k++)
            x[k] = (float)codes[k] * t->scales[row];
    }
    if (m->config.embedding_scale != 1.0f)
        for (size_t k = 0; k < dim; k++)
            x[k] *= m->config.embedding_scale;
}
