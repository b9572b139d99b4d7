/* SPDX-License-Identifier: MIT
 *
 * rows.c: products of matrices stored row by row, and rows of a table.
 */
#include "rows.h"

#include <string.h>

#include "scale.h"

typedef struct span {
    size_t first, n; /* rows of a matrix */
} span;

static span rows_of(const bn_tensor *t, size_t panel, size_t n) {
    return (span){panel * BN_PANEL, bn_rows_of(t, panel * BN_PANEL, n)};
}

static void emit_all(const bn_input *in, const bn_product *p, span rows, float *y) {
    for (size_t b = 0; b < in->rows; b++)
        bn_emit(in->o, p, b, rows.first, rows.n, y + b * BN_CHUNK_ROWS);
}

void bn_multiply_f32(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                     int32_t *acc) {
    const bn_tensor *t = p->w;
    const span rows = rows_of(t, panel, n);
    float *y = (float *)acc; /* scratch of the same size */
    in->o->kernels->products.f32_matmul(
        y, BN_CHUNK_ROWS, (const float *)t->data + rows.first * t->cols, rows.n, t->cols,
        in->o->h + in->first * in->o->wide, in->o->wide, in->rows);
    emit_all(in, p, rows, y);
}

void bn_multiply_f16(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                     int32_t *acc) {
    const bn_tensor *t = p->w;
    const span rows = rows_of(t, panel, n);
    float *y = (float *)acc;
    in->o->kernels->products.f16_matmul(
        y, BN_CHUNK_ROWS, (const uint16_t *)t->data + rows.first * t->cols, rows.n, t->cols,
        in->o->h + in->first * in->o->wide, in->o->wide, in->rows);
    emit_all(in, p, rows, y);
}

static bn_int8_rows int8_rows_of(const bn_input *in, const bn_tensor *t, span rows, int32_t *acc) {
    const size_t row_bytes = bn_int8_row(t->cols);
    return (bn_int8_rows){.acc = acc,
                          .acc_stride = BN_CHUNK_ROWS,
                          .codes = (const int8_t *)t->data + rows.first * row_bytes,
                          .row_bytes = row_bytes,
                          .rows = rows.n,
                          .q = in->o->q + in->first * in->o->q_stride,
                          .q_stride = in->o->q_stride,
                          .q_sums = in->o->q_sum + in->first,
                          .tokens = in->rows};
}

void bn_multiply_int8(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                      int32_t *acc) {
    const span rows = rows_of(p->w, panel, n);
    const bn_int8_rows m = int8_rows_of(in, p->w, rows, acc);
    in->o->kernels->products.int8_rows(&m);
    bn_scale_sums(in, p, acc, BN_CHUNK_ROWS, BN_AS_THEY_ARE, rows.first, rows.n);
}

void bn_linear_int8_rows(const bn_operands *o, const bn_tensor *t, const uint32_t *list, size_t n,
                         float *y) {
    int32_t acc[BN_CHUNK_ROWS];
    for (size_t first = 0; first < n; first += BN_CHUNK_ROWS) {
        const size_t rows = bn_min(n - first, BN_CHUNK_ROWS);
        bn_int8_rows m = int8_rows_of(&(bn_input){o, 0, 1}, t, (span){0, rows}, acc);
        m.list = list + first;
        o->kernels->products.int8_rows(&m);
        for (size_t i = 0; i < rows; i++) /* as bn_scaling defines it */
            y[first + i] = (float)acc[i] * (t->scales[list[first + i]] / o->s[0]);
    }
}

void bn_row_f32(const bn_kernels *kernels, const bn_tensor *t, size_t row, float *x) {
    (void)kernels;
    memcpy(x, (const float *)t->data + row * t->cols, t->cols * sizeof *x);
}

void bn_row_f16(const bn_kernels *kernels, const bn_tensor *t, size_t row, float *x) {
    kernels->bytes.f16_to_f32(x, (const uint16_t *)t->data + row * t->cols, t->cols);
}

void bn_row_int8(const bn_kernels *kernels, const bn_tensor *t, size_t row, float *x) {
    const int8_t *codes = (const int8_t *)t->data + row * bn_int8_row(t->cols);
    (void)kernels;
    for (size_t k = 0; k < t->cols; k++)
        x[k] = (float)codes[k] * t->scales[row];
}
