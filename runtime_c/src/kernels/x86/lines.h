/* SPDX-License-Identifier: MIT
 *
 * lines.h: integer products with the listed lines of a matrix, gathered from memory.
 *
 * Both kernels iterate over the list in their inner loop and prefetch the same position of the line
 * LINES_AHEAD entries later: a single line is too short for the hardware to detect a stream, and
 * when it does, it also fetches data past the line. dot accepts codes in any field, masked in
 * place.
 */
#ifndef BITNET_X86_LINES_H
#define BITNET_X86_LINES_H

#include "integer.h"

enum {
    LINE_SUMS = REGISTERS / 8, /* registers of columns per pass, with four sums each */
    LINES_AHEAD = 64, /* entries: 40 KB at 2560 codes, in L2; 32 a third slower, 128 no faster */
    VEC_CODES = 4 * sizeof(bytes)
};

INLINE void prefetch_line(const bn_lines *m, size_t entry, size_t at) {
    if (entry < m->n && at < m->codes / 4 && at % BN_TILE_BYTES == 0)
        _mm_prefetch((const char *)m->lines + m->list[entry] * m->line_bytes + at, _MM_HINT_T1);
}

/* The activations for each field of a register of codes; reads nothing past the padding of q. */
INLINE void activations(bytes x[4], const int8_t *q, size_t codes) {
    int8_t field[4][sizeof(bytes)] = {{0}};
    for (size_t unit = 0; unit < bn_min(codes, VEC_CODES); unit += BN_LINE_UNIT)
        for (size_t f = 0; f < 4; f++)
            memcpy(&field[f][unit / 4], q + unit + 16 * f, 16);
    for (size_t f = 0; f < 4; f++)
        x[f] = bytes_load(field[f]);
}

INLINE void lines_rows(const bn_lines *m, dot_fn *dot) {
    for (size_t first = 0; first < m->n; first += LINES_AHEAD) {
        const size_t n = bn_min(m->n - first, LINES_AHEAD);
        sums sum[LINES_AHEAD];
        for (size_t i = 0; i < n; i++)
            sum[i] = sums_zero();
        for (size_t k = 0; k < m->codes; k += VEC_CODES) {
            bytes x[4];
            activations(x, m->q + k, m->codes - k);
            for (size_t i = 0; i < n; i++) {
                prefetch_line(m, first + i + LINES_AHEAD, k / 4);
                const bytes c = bytes_load(m->lines + m->list[first + i] * m->line_bytes + k / 4);
                sum[i] = fields_dot(sum[i], c, x, dot);
            }
        }
        for (size_t i = 0; i < n; i++)
            m->acc[first + i] = sums_total(sum[i]);
    }
}

/* Interleaves the bytes of four columns at the same position: register `part` of four holds bytes
 * 4·part to 4·part + 3 of every unit. */
INLINE bytes side_by_side(const bytes c[4], int part) {
    const bytes ab = part < 2 ? bytes_low8(c[0], c[1]) : bytes_high8(c[0], c[1]);
    const bytes cd = part < 2 ? bytes_low8(c[2], c[3]) : bytes_high8(c[2], c[3]);
    return part % 2 == 0 ? bytes_low16(ab, cd) : bytes_high16(ab, cd);
}

/* Adds the four sums of each unit to acc. */
INLINE void add_lanes(int32_t *acc, sums sum) {
    int32_t lane[VEC_ROWS];
    sums_store(lane, sum);
    for (size_t i = 0; i < VEC_ROWS; i++)
        acc[i / 4 * BN_LINE_UNIT + i % 4] += lane[i];
}

/* Registers part to part + LINE_SUMS - 1 of the columns' bytes at `at`. Fields are masked, not
 * shifted: field f is scaled by 4^f and has its own sum. */
INLINE void columns_pass(const bn_lines *m, size_t at, const int part, dot_fn *dot) {
    sums sum[LINE_SUMS][4];
    UNROLL
    for (int p = 0; p < LINE_SUMS; p++)
        sum[p][0] = sum[p][1] = sum[p][2] = sum[p][3] = sums_zero();
    for (size_t i = 0; i < m->n; i += 4) {
        const bytes q = bytes_spread(m->q + i);
        bytes c[4];
        UNROLL
        for (size_t j = 0; j < 4; j++) {
            const size_t ahead = i + j + LINES_AHEAD;
            if (ahead < m->n)
                prefetch_line(m, ahead, at);
            else /* wraps to the start of the list, for the next pass */
                prefetch_line(m, ahead - m->n, at + sizeof(bytes));
            c[j] = bytes_load(m->lines + m->list[i + j] * m->line_bytes + at);
        }
        UNROLL
        for (int p = 0; p < LINE_SUMS; p++) {
            const bytes codes = side_by_side(c, part + p);
            UNROLL
            for (int f = 0; f < 4; f++)
                sum[p][f] = dot(sum[p][f], bytes_and(codes, bytes_fill(3 << 2 * f)), q);
        }
    }
    UNROLL
    for (int p = 0; p < LINE_SUMS; p++) {
        int32_t *acc = m->acc + 4 * at + 4 * (part + p);
        add_lanes(acc, sum[p][0]);
        add_lanes(acc + 16, sums_shr(sum[p][1], 2));
        add_lanes(acc + 32, sums_shr(sum[p][2], 4));
        add_lanes(acc + 48, sums_shr(sum[p][3], 6));
    }
}

INLINE void lines_columns(const bn_lines *m, dot_fn *dot) {
    for (size_t at = 0; at < m->codes / 4; at += sizeof(bytes)) {
        columns_pass(m, at, 0, dot);
        if (LINE_SUMS < 4)
            columns_pass(m, at, 2, dot);
    }
}

#endif
