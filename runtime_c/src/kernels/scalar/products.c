/* SPDX-License-Identifier: MIT
 *
 * products.c: see products.h.
 */
#include "scalar.h"

/* --- exact integer products --- */

static void ternary_matmul(const bn_matmul *m) {
    for (size_t t = 0; t < m->tokens; t++) {
        const int8_t *q = m->q + t * m->q_stride;
        for (size_t p = 0; p < m->panels; p++) {
            const uint8_t *tile = m->tiles + p * m->panel_stride;
            int32_t sum[BN_PANEL] = {0};
            for (size_t kt = 0; kt < m->k_tiles; kt++, tile += BN_TILE_BYTES)
                for (int row = 0; row < BN_PANEL; row++)
                    for (int i = 0; i < 4; i++) {
                        const uint32_t byte = tile[4 * row + i];
                        const int8_t *qk = q + kt * BN_TERNARY_TILE_K + i;
                        for (int f = 0; f < 4; f++)
                            sum[row] += (int32_t)(byte >> 2 * f & 3) * qk[4 * f];
                    }
            memcpy(m->acc + t * m->acc_stride + p * BN_PANEL, sum, sizeof sum);
        }
    }
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    ternary_matmul(m);
    bn_scalar_vectors.scale_sums(a);
}

static void ternary_lookup(const bn_matmul *m, void *scratch) {
    (void)scratch;
    ternary_matmul(m);
}

static void trit_matmul(const bn_matmul *m) {
    for (size_t t = 0; t < m->tokens; t++) {
        const int8_t *q = m->q + t * m->q_stride;
        for (size_t p = 0; p < m->panels; p++) {
            const uint8_t *tile = m->tiles + p * m->panel_stride;
            int32_t sum[BN_PANEL] = {0};
            for (size_t kt = 0; kt < m->k_tiles; kt++, tile += BN_TILE_BYTES)
                for (int row = 0; row < BN_PANEL; row++)
                    for (int i = 0; i < 4; i++) {
                        uint32_t v = tile[4 * row + i];
                        const int8_t *qk = q + kt * BN_TRIT_TILE_K + i;
                        for (int f = 0; f < 5; f++, v = 3 * v & 255)
                            sum[row] += (int32_t)(3 * v >> 8) * qk[4 * f];
                    }
            memcpy(m->acc + t * m->acc_stride + p * BN_PANEL, sum, sizeof sum);
        }
    }
}

static void int8_rows(const bn_int8_rows *m) {
    for (size_t t = 0; t < m->tokens; t++)
        for (size_t r = 0; r < m->rows; r++) {
            const int8_t *codes = bn_int8_row_at(m, r);
            int32_t sum = 0;
            for (size_t k = 0; k < m->row_bytes; k++)
                sum += codes[k] * m->q[t * m->q_stride + k];
            m->acc[t * m->acc_stride + r] = sum;
        }
}

/* Stored code i of a line. */
static int32_t line_code(const uint8_t *line, size_t i) {
    return line[i / BN_LINE_UNIT * 16 + i % 16] >> i % BN_LINE_UNIT / 16 * 2 & 3;
}

static void ternary_rows(const bn_lines *m) {
    for (size_t i = 0; i < m->n; i++) {
        const uint8_t *line = m->lines + m->list[i] * m->line_bytes;
        int32_t sum = 0;
        for (size_t k = 0; k < m->codes; k++)
            sum += line_code(line, k) * m->q[k];
        m->acc[i] = sum;
    }
}

static void ternary_columns(const bn_lines *m) {
    for (size_t i = 0; i < m->n; i++) {
        const uint8_t *line = m->lines + m->list[i] * m->line_bytes;
        for (size_t r = 0; r < m->codes; r++)
            m->acc[r] += line_code(line, r) * m->q[i];
    }
}

/* --- ternary with a scale for every group of columns --- */

static void ternary_grouped(const bn_grouped *m) {
    const size_t n_groups = (m->k_tiles + BN_GROUP_TILES - 1) / BN_GROUP_TILES;
    for (size_t t = 0; t < m->tokens; t++)
        for (size_t p = 0; p < m->panels; p++) {
            float y[BN_PANEL] = {0};
            for (size_t g = 0; g < n_groups; g++) {
                const size_t first = g * BN_GROUP_TILES, left = m->k_tiles - first;
                int32_t sum[BN_PANEL];
                ternary_matmul(
                    &(bn_matmul){.acc = sum,
                                 .acc_stride = BN_PANEL,
                                 .tiles = m->tiles + (p * m->k_tiles + first) * BN_TILE_BYTES,
                                 .panels = 1,
                                 .k_tiles = left < BN_GROUP_TILES ? left : BN_GROUP_TILES,
                                 .q = m->q + t * m->q_stride + first * BN_TERNARY_TILE_K,
                                 .tokens = 1});
                for (size_t r = 0; r < BN_PANEL; r++) {
                    const int32_t d = sum[r] - m->q_sums[t * m->q_sums_stride + g];
                    const uint16_t scale = m->scales[(p * n_groups + g) * BN_PANEL + r];
                    y[r] = fmaf((float)d, half_to_float(scale), y[r]);
                }
            }
            memcpy(m->y + t * m->y_stride + p * BN_PANEL, y, sizeof y);
        }
}

/* --- floats --- */

static float dot_f16(const uint16_t *w, const float *x, size_t n) {
    float lane[BN_LANES] = {0};
    for (size_t k = 0; k < n; k += BN_LANES)
        for (size_t j = 0; j < BN_LANES; j++)
            lane[j] =
                k + j < n ? fmaf(half_to_float(w[k + j]), x[k + j], lane[j]) : fmaf(0, 0, lane[j]);
    return tree(lane);
}

static void f32_matmul(float *y, size_t y_stride, const float *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens) {
    for (size_t r = 0; r < rows; r++)
        for (size_t t = 0; t < tokens; t++)
            y[t * y_stride + r] = dot_f32(w + r * cols, x + t * x_stride, cols);
}

static void f16_matmul(float *y, size_t y_stride, const uint16_t *w, size_t rows, size_t cols,
                       const float *x, size_t x_stride, size_t tokens) {
    for (size_t r = 0; r < rows; r++)
        for (size_t t = 0; t < tokens; t++)
            y[t * y_stride + r] = dot_f16(w + r * cols, x + t * x_stride, cols);
}

static void int8_add_rows(const bn_add_rows *a) {
    for (size_t t = 0; t < a->tokens; t++)
        for (size_t i = 0; i < a->n; i++) {
            float s = 0;
            for (size_t r = 0; r < a->rank; r++)
                s = fmaf((float)a->w[r * a->w_stride + i], a->x[t * a->x_stride + r], s);
            a->y[t * a->y_stride + i] += s * a->weight;
        }
}

/* --- peak rate --- */

static uint64_t int8_peak(uint64_t rounds, int32_t *sink) {
    int8_t w[64], q[64];
    for (int i = 0; i < 64; i++) {
        w[i] = (int8_t)(i % 3 + *sink % 2);
        q[i] = (int8_t)(i + *sink % 3);
    }
    uint32_t sum = 0; /* wraps */
    for (uint64_t r = 0; r < rounds; r++)
        for (int i = 0; i < 64; i++)
            sum += (uint32_t)(w[i] * (int8_t)(q[i] ^ (int8_t)(r & 63)));
    *sink = (int32_t)(sum >> 1);
    return rounds * 64;
}

const bn_product_kernels bn_scalar_products = {
    .ternary_matmul = ternary_matmul,
    .ternary_scaled = ternary_scaled,
    .sketch_matmul = ternary_matmul,
    .ternary_lookup = ternary_lookup,
    .trit_matmul = trit_matmul,
    .ternary_grouped = ternary_grouped,
    .int8_rows = int8_rows,
    .ternary_rows = ternary_rows,
    .ternary_columns = ternary_columns,
    .f32_matmul = f32_matmul,
    .f16_matmul = f16_matmul,
    .int8_add_rows = int8_add_rows,
    .int8_peak = int8_peak,
};
