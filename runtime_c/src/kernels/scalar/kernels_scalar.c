/* SPDX-License-Identifier: MIT
 *
 * kernels_scalar.c: the specification of every kernel, in plain C. The SIMD tiers give the same
 * bits; runtime_c/tests/check_kernels.c holds them to it.
 */
#include "../kernels.h"

#include <math.h>
#include <string.h>

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
            int32_t sum = 0;
            for (size_t k = 0; k < m->row_bytes; k++)
                sum += m->codes[r * m->row_bytes + k] * m->q[t * m->q_stride + k];
            m->acc[t * m->acc_stride + r] = sum;
        }
}

/* The code of column (or, of a column, row) i of a line, as stored. */
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

/* --- the float rule --- */

static float tree(const float lane[BN_LANES]) {
    float s[BN_LANES];
    memcpy(s, lane, sizeof s);
    for (int half = BN_LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            s[j] += s[j + half];
    return s[0];
}

static float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = h >> 10 & 31u, mantissa = h & 0x3FFu;
    uint32_t bits;
    float f;
    if (exponent == 31) { /* infinity, NaN (made quiet, as the hardware does) */
        bits = sign | 0x7F800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u);
    } else if (exponent == 0) { /* zero, subnormal: mantissa * 2^-24 is exact */
        f = (float)mantissa * 5.9604644775390625e-8f;
        memcpy(&bits, &f, sizeof bits);
        bits |= sign;
    } else {
        bits = sign | (exponent + 112u) << 23 | mantissa << 13;
    }
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) /* NaN keeps its upper payload, made quiet */
        return (uint16_t)(sign | 0x7E00u | (bits >> 13 & 0x3FFu));
    if (bits > 0x477FE000u) /* above 65504 */
        return (uint16_t)(sign | 0x7BFFu);
    if (bits < 0x38800000u) { /* below 2^-14: a multiple of 2^-24, rounded by adding 0.5 */
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f; /* ulp of [0.5, 1) is 2^-24 */
        memcpy(&bits, &magnitude, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3F000000u));
    }
    bits += 0xFFFu + (bits >> 13 & 1u); /* round half to even */
    const uint32_t half = (bits - 0x38000000u) >> 13;
    return (uint16_t)(sign | (half > 0x7BFFu ? 0x7BFFu : half));
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

static float dot_f32(const float *w, const float *x, size_t n) {
    float lane[BN_LANES] = {0};
    for (size_t k = 0; k < n; k += BN_LANES)
        for (size_t j = 0; j < BN_LANES; j++)
            lane[j] = k + j < n ? fmaf(w[k + j], x[k + j], lane[j]) : fmaf(0, 0, lane[j]);
    return tree(lane);
}

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

/* --- norms, activations --- */

static float quantize(int8_t *q, int32_t *sum, const float *x, size_t n, size_t padded) {
    float largest = 1e-5f;
    for (size_t i = 0; i < n; i++)
        largest = fabsf(x[i]) > largest || isnan(x[i]) ? fabsf(x[i]) : largest;
    const float s = 127.0f / largest;
    int32_t total = 0;
    for (size_t i = 0; i < n; i++) {
        float v = x[i] * s;
        v = v > -127.0f ? v : -127.0f; /* before the conversion, so that NaN is defined */
        v = v < 127.0f ? v : 127.0f;
        q[i] = (int8_t)rintf(v);
        total += q[i];
    }
    memset(q + n, 0, padded - n);
    *sum = total;
    return s;
}

static float rms_norm(float *y, const float *x, const float *gain, size_t n, float eps) {
    const float sum = dot_f32(x, x, n);
    const float r = 1.0f / sqrtf(sum / (float)n + eps);
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * r * gain[i];
    return sum;
}

static float max_of(const float *x, size_t n) {
    float m = -INFINITY;
    for (size_t i = 0; i < n; i++)
        m = x[i] > m ? x[i] : m;
    return m;
}

float bn_exp(float x) {
    if (isnan(x))
        return x;
    x = x > BN_EXP_LO ? x : BN_EXP_LO;
    x = x < BN_EXP_HI ? x : BN_EXP_HI;
    const float n = rintf(x * BN_LOG2E);
    float r = fmaf(n, -BN_LN2_HI, x);
    r = fmaf(n, -BN_LN2_LO, r);
    float p = BN_EXP_C6;
    p = fmaf(p, r, BN_EXP_C5);
    p = fmaf(p, r, BN_EXP_C4);
    p = fmaf(p, r, BN_EXP_C3);
    p = fmaf(p, r, BN_EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t bits;
    memcpy(&bits, &p, sizeof bits);
    bits += (int32_t)n * (1 << 23);
    memcpy(&p, &bits, sizeof p);
    return p;
}

static float exp_sum(float *x, size_t n, float shift) {
    float lane[BN_LANES] = {0};
    for (size_t i = 0; i < n; i++) {
        x[i] = bn_exp(x[i] - shift);
        lane[i % BN_LANES] += x[i];
    }
    return tree(lane);
}

static void silu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++)
        h[i] = g[i] / (1.0f + bn_exp(-g[i])) * u[i];
}

static float positive(float g) {
    return g <= 0.0f ? 0.0f : g; /* NaN stays */
}

static void relu2_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float r = positive(g[i]);
        h[i] = r * r * u[i];
    }
}

static void gelu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float z2 = g[i] * fmaf(BN_GELU_C1, g[i] * g[i], BN_GELU_C0);
        h[i] = g[i] / (1.0f + bn_exp(-z2)) * u[i];
    }
}

static void relu_gate(float *h, const float *g, const float *u, size_t n) {
    for (size_t i = 0; i < n; i++)
        h[i] = positive(g[i]) * u[i];
}

/* --- attention --- */

static void qk_f32(float *scores, size_t score_stride, const float *q, size_t n_q, const float *k,
                   size_t head_dim, size_t tiles) {
    for (size_t i = 0; i < n_q; i++)
        for (size_t key = 0; key < tiles * BN_LANES; key++) {
            const float *column = k + key / BN_LANES * head_dim * BN_LANES + key % BN_LANES;
            float lane[BN_LANES] = {0};
            for (size_t d = 0; d < head_dim; d += BN_LANES)
                for (size_t j = 0; j < BN_LANES; j++)
                    lane[j] = d + j < head_dim ? fmaf(column[(d + j) * BN_LANES],
                                                      q[i * head_dim + d + j], lane[j])
                                               : fmaf(0, 0, lane[j]);
            scores[i * score_stride + key] = tree(lane);
        }
}

static void qk_f16(float *scores, size_t score_stride, const float *q, size_t n_q,
                   const uint16_t *k, size_t head_dim, size_t tiles) {
    for (size_t i = 0; i < n_q; i++)
        for (size_t key = 0; key < tiles * BN_LANES; key++) {
            const uint16_t *column = k + key / BN_LANES * head_dim * BN_LANES + key % BN_LANES;
            float lane[BN_LANES] = {0};
            for (size_t d = 0; d < head_dim; d += BN_LANES)
                for (size_t j = 0; j < BN_LANES; j++)
                    lane[j] = d + j < head_dim ? fmaf(half_to_float(column[(d + j) * BN_LANES]),
                                                      q[i * head_dim + d + j], lane[j])
                                               : fmaf(0, 0, lane[j]);
            scores[i * score_stride + key] = tree(lane);
        }
}

static void pv_f32(float *out, const float *p, size_t p_stride, size_t n_q, const float *v,
                   size_t head_dim, size_t keys) {
    for (size_t i = 0; i < n_q; i++)
        for (size_t t = 0; t < keys; t++)
            for (size_t d = 0; d < head_dim; d++)
                out[i * head_dim + d] =
                    fmaf(p[i * p_stride + t], v[t * head_dim + d], out[i * head_dim + d]);
}

static void pv_f16(float *out, const float *p, size_t p_stride, size_t n_q, const uint16_t *v,
                   size_t head_dim, size_t keys) {
    for (size_t i = 0; i < n_q; i++)
        for (size_t t = 0; t < keys; t++)
            for (size_t d = 0; d < head_dim; d++)
                out[i * head_dim + d] = fmaf(
                    p[i * p_stride + t], half_to_float(v[t * head_dim + d]), out[i * head_dim + d]);
}

static void qk_int8(float *scores, size_t score_stride, const int8_t *q, const float *q_scale,
                    size_t n_q, const int8_t *k, const float *k_scale, size_t head_dim,
                    size_t tiles) {
    const size_t words = (head_dim + 3) / 4, q_stride = bn_q_row(head_dim);
    for (size_t i = 0; i < n_q; i++)
        for (size_t key = 0; key < tiles * BN_LANES; key++) {
            const int8_t *word = k + (key / BN_LANES * words * BN_LANES + key % BN_LANES) * 4;
            int32_t sum = 0;
            for (size_t d = 0; d < head_dim; d++)
                sum += word[d / 4 * BN_LANES * 4 + d % 4] * q[i * q_stride + d];
            scores[i * score_stride + key] = (float)sum * (q_scale[i] * k_scale[key]);
        }
}

static void pv_int8(float *out, const float *p, size_t p_stride, size_t n_q, const int8_t *v,
                    size_t head_dim, size_t keys) {
    for (size_t i = 0; i < n_q; i++)
        for (size_t t = 0; t < keys; t++)
            for (size_t d = 0; d < head_dim; d++)
                out[i * head_dim + d] =
                    fmaf(p[i * p_stride + t], (float)v[t * head_dim + d], out[i * head_dim + d]);
}

static void f32_to_f16(uint16_t *y, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        y[i] = float_to_half(x[i]);
}

static void f16_to_f32(float *y, const uint16_t *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        y[i] = half_to_float(x[i]);
}

/* --- the rest --- */

static uint32_t crc32(uint32_t crc, const uint8_t *p, size_t n) {
    /* Half a byte at a time; entry i is i shifted out of the polynomial 0xEDB88320. */
    static const uint32_t table[16] = {0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC,
                                       0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
                                       0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C,
                                       0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C};
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}

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

void bn_kernels_scalar(bn_kernels *table) {
    *table = (bn_kernels){
        .isa = "scalar",
        .ternary_matmul = ternary_matmul,
        .sketch_matmul = ternary_matmul,
        .ternary_lookup = ternary_lookup,
        .trit_matmul = trit_matmul,
        .ternary_grouped = ternary_grouped,
        .int8_rows = int8_rows,
        .ternary_rows = ternary_rows,
        .ternary_columns = ternary_columns,
        .f32_matmul = f32_matmul,
        .f16_matmul = f16_matmul,
        .quantize = quantize,
        .rms_norm = rms_norm,
        .max = max_of,
        .exp_sum = exp_sum,
        .silu_gate = silu_gate,
        .relu2_gate = relu2_gate,
        .gelu_gate = gelu_gate,
        .relu_gate = relu_gate,
        .qk_f16 = qk_f16,
        .qk_f32 = qk_f32,
        .pv_f16 = pv_f16,
        .pv_f32 = pv_f32,
        .qk_int8 = qk_int8,
        .pv_int8 = pv_int8,
        .f32_to_f16 = f32_to_f16,
        .f16_to_f32 = f16_to_f32,
        .crc32 = crc32,
        .int8_peak = int8_peak,
    };
}
