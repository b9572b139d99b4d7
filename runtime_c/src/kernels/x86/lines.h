/* SPDX-License-Identifier: MIT
 *
 * lines.h: integer products with the lines of a matrix that are listed, gathered from memory.
 *
 * Both go along the list before they go along the lines, and ask for the same place of the line
 * LINES_AHEAD entries on: a line alone is too short for the hardware to see a stream in it, and
 * where it sees one it fetches what comes after the line too.
 * dot takes codes of any field where it lies in its byte.
 */
#ifndef BITNET_X86_LINES_H
#define BITNET_X86_LINES_H

#include "integer.h"

enum {
    LINE_SUMS = REGISTERS / 8, /* registers of columns a pass has sums for, four each */
    LINES_AHEAD = 64, /* entries: 40 KB at 2560 codes, in the second-level cache; 32 are slower by a
                         third, 128 no faster */
    VEC_CODES = 4 * sizeof(bytes)
};

INLINE void prefetch_line(const bn_lines *m, size_t entry, size_t at) {
    if (entry < m->n && at < m->codes / 4 && at % BN_TILE_BYTES == 0)
        _mm_prefetch((const char *)m->lines + m->list[entry] * m->line_bytes + at, _MM_HINT_T1);
}

/* The activations that meet each field of a register of codes; none past the padding of q. */
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

/* Four columns at one place of their lines, a byte of each side by side: register `part` of four
 * has bytes 4·part to 4·part + 3 of every unit. */
INLINE bytes side_by_side(const bytes c[4], int part) {
    const bytes ab = part < 2 ? bytes_low8(c[0], c[1]) : bytes_high8(c[0], c[1]);
    const bytes cd = part < 2 ? bytes_low8(c[2], c[3]) : bytes_high8(c[2], c[3]);
    return part % 2 == 0 ? bytes_low16(ab, cd) : bytes_high16(ab, cd);
}

/* Four sums of each unit. */
INLINE void add_lanes(int32_t *acc, sums sum) {
    int32_t lane[VEC_ROWS];
    sums_store(lane, sum);
    for (size_t i = 0; i < VEC_ROWS; i++)
        acc[i / 4 * BN_LINE_UNIT + i % 4] += lane[i];
}

/* The registers from `part` on of the columns' bytes from `at` on. Fields are masked, never
 * shifted: field f counts 4^f times, in a sum of its own. */
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
            else /* the list from its first, for the next pass */
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
