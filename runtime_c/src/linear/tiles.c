/* SPDX-License-Identifier: MIT
 *
 * tiles.c: products of matrices stored as tiles, and rows of a table. Codes are T + 1, so a product
 * is Σ (T+1)·q - Σ q.
 */
#include "tiles.h"

#include "scale.h"

bn_matmul bn_tiles_of(const bn_input *in, const bn_tensor *t, size_t tile_k, size_t panel, size_t n,
                      int32_t *acc) {
    const size_t k_tiles = bn_div_up(t->cols, tile_k), panel_bytes = k_tiles * BN_TILE_BYTES;
    return (bn_matmul){.acc = acc,
                       .acc_stride = BN_CHUNK_ROWS,
                       .tiles = t->data + panel * panel_bytes,
                       .panel_stride = panel_bytes,
                       .panels = n,
                       .k_tiles = k_tiles,
                       .q = in->o->q + in->first * in->o->q_stride,
                       .q_stride = in->o->q_stride,
                       .tokens = in->rows};
}

/* With one scale per 128 inputs: y = v/s, v the kernel's sum over the groups. */
static void multiply_groups(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                            float *v) {
    const bn_tensor *t = p->w;
    const bn_operands *o = in->o;
    const size_t k_tiles = bn_div_up(t->cols, BN_TERNARY_TILE_K);
    const size_t r0 = panel * BN_PANEL, rows = bn_rows_of(t, r0, n);
    in->o->kernels->products.ternary_grouped(
        &(bn_grouped){.y = v,
                      .y_stride = BN_CHUNK_ROWS,
                      .tiles = t->data + panel * k_tiles * BN_TILE_BYTES,
                      .scales = t->group_scales + r0 * bn_div_up(k_tiles, BN_GROUP_TILES),
                      .panels = n,
                      .k_tiles = k_tiles,
                      .q = o->q + in->first * o->q_stride,
                      .q_stride = o->q_stride,
                      .q_sums = o->group_sums + in->first * o->group_sums_stride,
                      .q_sums_stride = o->group_sums_stride,
                      .tokens = in->rows});
    for (size_t b = 0; b < in->rows; b++, v += BN_CHUNK_ROWS) {
        for (size_t r = 0; r < rows; r++)
            v[r] /= o->s[in->first + b];
        bn_emit(o, p, b, r0, rows, v);
    }
}

void bn_multiply_two_bit(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                         int32_t *acc) {
    const size_t r0 = panel * BN_PANEL, rows = bn_rows_of(p->w, r0, n);
    if (p->w->scale_scope == BN_SCALE_GROUP) {
        multiply_groups(in, p, panel, n, (float *)acc); /* scratch of the same size */
        return;
    }
    const bn_matmul mm = bn_tiles_of(in, p->w, BN_TERNARY_TILE_K, panel, n, acc);
    const bn_scaling to = bn_scaling_of(in, p, acc, BN_CHUNK_ROWS, BN_ONE_MORE, r0, rows);
    in->o->kernels->products.ternary_scaled(&mm, &to);
}

void bn_multiply_trits(const bn_input *in, const bn_product *p, size_t panel, size_t n,
                       int32_t *acc) {
    const size_t r0 = panel * BN_PANEL;
    const bn_matmul mm = bn_tiles_of(in, p->w, BN_TRIT_TILE_K, panel, n, acc);
    in->o->kernels->products.trit_matmul(&mm);
    bn_scale_sums(in, p, acc, BN_CHUNK_ROWS, BN_ONE_MORE, r0, bn_rows_of(p->w, r0, n));
}

void bn_sum_groups(const bn_operands *o, size_t row, size_t width) {
    const int8_t *q = o->q + row * o->q_stride;
    int32_t *sums = o->group_sums + row * o->group_sums_stride;
    for (size_t k = 0; k < width; k += BN_SCALE_GROUP_K) {
        const size_t end = bn_min(width, k + BN_SCALE_GROUP_K);
        int32_t sum = 0;
        for (size_t i = k; i < end; i++)
            sum += q[i];
        *sums++ = sum;
    }
}

/* Values are -1, 0 or 1, so their product with the scale is exact. */
void bn_row_two_bit(const bn_kernels *kernels, const bn_tensor *t, size_t row, float *x) {
    const size_t panel = row / BN_PANEL, dim = t->cols;
    const size_t tiles = bn_div_up(dim, BN_TERNARY_TILE_K);
    const size_t n_groups = bn_div_up(tiles, BN_GROUP_TILES);
    const uint8_t *tile = t->data + panel * tiles * BN_TILE_BYTES + row % BN_PANEL * 4;
    float scale = t->scale_scope == BN_SCALE_TENSOR ? t->scales[0]
                  : t->scale_scope == BN_SCALE_ROW  ? t->scales[row]
                                                    : 0;
    for (size_t k = 0; k < dim; k++) {
        const size_t byte = k / BN_TERNARY_TILE_K * BN_TILE_BYTES + k % 4, field = k % 16 / 4;
        if (t->scale_scope == BN_SCALE_GROUP && k % BN_SCALE_GROUP_K == 0) {
            const size_t at = (panel * n_groups + k / BN_SCALE_GROUP_K) * BN_PANEL;
            kernels->bytes.f16_to_f32(&scale, t->group_scales + at + row % BN_PANEL, 1);
        }
        x[k] = (float)((tile[byte] >> 2 * field & 3) - 1) * scale;
    }
}
