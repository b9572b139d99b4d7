/* SPDX-License-Identifier: MIT
 *
 * panels.h: integer products with vpdpbusd for several tokens. Loads are the bottleneck: Zen 5
 * loads two registers per cycle and multiplies two. So four panels share the loaded activations,
 * and up to six tokens the loaded and unpacked panels: 10 loads for 24 products. (One panel,
 * activations as memory operands: 25 loads, and 0.91 of the peak; this 0.98, and 1.0 with 4 tokens
 * instead of 0.91.)
 *
 * Intel's cores multiply 512 bits on the same two ports that unpack, and unpacking takes as long as
 * 28 of a block's 96 products. So with more than six tokens the first block keeps the codes, a byte
 * each, in L1, and the others load them. Emerald Rapids, fraction of the peak with 8, 16 and 128
 * tokens: 0.67, 0.77 and 0.80 without, 0.81, 0.88 and 0.97 with this. Alternatives tried there:
 *   16 or 32 tile columns kept instead of 24: 3 % slower with 128 tokens, 12 % slower with 8
 *   fields one after another, masked, with the sums shifted in between: 3 to 6 tokens 5 % faster
 *     from a cache, as much slower from memory, and prompts 2 % slower
 * AMD's cores unpack on separate ports: keeping the codes costs 1 to 2 % (Zen 4).
 *   3 to 6 tokens by stream.h: 8 to 12 % faster from a cache, and as much slower from memory
 */
#ifndef BITNET_X86_PANELS_H
#define BITNET_X86_PANELS_H

#include "integer.h"
#include "scale.h"
#include "stream.h"

enum {
    BLOCK_PANELS = 4, /* panels multiplied together */
    KEPT_TILES = 24   /* tiles of each whose codes are kept: 24 kB */
};
#define EACH_PANEL_AND(X, t) X(0, t) X(1, t) X(2, t) X(3, t)

/* The weights of a block: four panels, `tiles` tiles of each. */
typedef struct four_panels {
    const uint8_t *tile;
    size_t stride; /* bytes from one panel to the next */
    size_t tiles;
    const uint8_t *next; /* tiles to prefetch, with the same stride */
    int more;            /* acc holds the sums of earlier tiles, to be added to */
} four_panels;

/* Source of a block's codes: the tiles, or the buffer in which an earlier block kept them, a byte
 * each. */
typedef enum codes_from { FROM_TILES, FROM_TILES_TO_KEEP, FROM_KEPT } codes_from;

/* Four registers of rows, T tokens. Writes sums to acc or, unless `to` is NULL, scaled outputs from
 * `row` and `token` on. kept: buffer of unpacked codes, [tile][field][panel]. */
INLINE void ternary_panels(int32_t *acc, size_t acc_stride, const bn_scaling *to, size_t row,
                           size_t token, const four_panels *w, uint8_t *kept, const int8_t *q,
                           size_t q_stride, dot_fn *dot, const codes_from from, const int T) {
    const bytes three = bytes_fill(3);
    const uint8_t *tile = w->tile, *next = w->next;
    const size_t stride = w->stride;
    sums sum[6][BLOCK_PANELS];
#define CLEAR(t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = sums_zero();
#define LOAD(p, t) sum[t][p] = sums_load(acc + t * acc_stride + p * BN_PANEL);
#define LOAD_ALL(t)                                                                                \
    if (t < T) {                                                                                   \
        EACH_PANEL_AND(LOAD, t)                                                                    \
    }
    EACH_TOKEN(CLEAR)
    if (w->more) {
        EACH_TOKEN(LOAD_ALL)
    }
#undef LOAD_ALL
#undef LOAD
#undef CLEAR
    for (size_t k = w->tiles; k > 0; k--, q += BN_TERNARY_TILE_K) {
#define DOT(p, t) sum[t][p] = dot(sum[t][p], codes##p, x);
#define TOKEN(t, f)                                                                                \
    if (t < T) {                                                                                   \
        const bytes x = bytes_spread(q + t * q_stride + 4 * f);                                    \
        EACH_PANEL_AND(DOT, t)                                                                     \
    }
/* More streams than the hardware prefetcher detects (15 GB/s without, 27 with this, 4 tokens). From
 * 4 tokens on, multiplying takes longer than memory. */
#define AHEAD(p, f)                                                                                \
    if (T < 4)                                                                                     \
        prefetch_twice(next + p * stride, tile + p * stride);                                      \
    else                                                                                           \
        _mm_prefetch((const char *)next + p * stride, _MM_HINT_T0);
#define CODES(p, f)                                                                                \
    const bytes codes##p =                                                                         \
        from == FROM_KEPT ? bytes_load(kept + (f * BLOCK_PANELS + p) * sizeof(bytes))              \
                          : bytes_and(bytes_shr(bytes_load(tile + p * stride), 2 * f), three);     \
    if (from == FROM_TILES_TO_KEEP)                                                                \
        bytes_store(kept + (f * BLOCK_PANELS + p) * sizeof(bytes), codes##p);
#define FIELD(f)                                                                                   \
    { EACH_PANEL_AND(CODES, f) EACH_TOKEN_AND(TOKEN, f) }
        if (from != FROM_KEPT) {
            EACH_PANEL_AND(AHEAD, 0)
        }
        FIELD(0)
        FIELD(1)
        FIELD(2)
        FIELD(3)
        tile += BN_TILE_BYTES, next += BN_TILE_BYTES;
        kept += from == FROM_TILES ? 0 : 4 * BLOCK_PANELS * sizeof(bytes);
#undef FIELD
#undef CODES
#undef AHEAD
#undef TOKEN
#undef DOT
    }
#define SUMS(p, t) sums_store(acc + t * acc_stride + p * BN_PANEL, sum[t][p]);
#define FLOATS(p, t)                                                                               \
    vec_store(y + p * BN_PANEL, scaled(&a, row + p * BN_PANEL, y + p * BN_PANEL, sum[t][p], of));
#define PUT_SUMS(t)                                                                                \
    if (t < T) {                                                                                   \
        EACH_PANEL_AND(SUMS, t)                                                                    \
    }
#define PUT_FLOATS(t)                                                                              \
    if (t < T) {                                                                                   \
        const token_scale of = scale_of(&a, token + t);                                            \
        float *y = a.y + (token + t) * a.y_stride + row;                                           \
        EACH_PANEL_AND(FLOATS, t)                                                                  \
    }
    if (to) {
        const bn_scaling a = *to; /* local copy: stores cannot alias it */
        EACH_TOKEN(PUT_FLOATS)
    } else {
        EACH_TOKEN(PUT_SUMS)
    }
#undef PUT_FLOATS
#undef PUT_SUMS
#undef FLOATS
#undef SUMS
}

/* Two tokens, two panels: fields are masked, not shifted, as in stream.h, and there are registers
 * for the sums of each. The next two panels are prefetched in memory order (39 GB/s; 34 in the
 * order of use; from the cache 0.97 of the peak, 0.84 with four panels). */
INLINE void pair_panels(const bn_matmul *m, size_t panel, dot_fn *dot) {
    const uint8_t *tile = m->tiles + panel * m->panel_stride, *next = tile + m->panel_stride;
    const uint8_t *ahead = next + bn_max(m->panel_stride, FAR);
    const int8_t *q = m->q;
    sums sum[2][2][4];
    UNROLL
    for (int f = 0; f < 4; f++)
        sum[0][0][f] = sum[0][1][f] = sum[1][0][f] = sum[1][1][f] = sums_zero();
    for (size_t k = m->k_tiles; k > 0; k--) {
        prefetch_twice(ahead, tile);
        prefetch_twice(ahead + BN_TILE_BYTES, next);
        const bytes a = bytes_load(tile), b = bytes_load(next);
        UNROLL
        for (int f = 0; f < 4; f++) {
            const bytes field_a = bytes_and(a, bytes_fill(3 << 2 * f));
            const bytes field_b = bytes_and(b, bytes_fill(3 << 2 * f));
            const bytes x = bytes_spread(q + 4 * f), y = bytes_spread(q + m->q_stride + 4 * f);
            sum[0][0][f] = dot(sum[0][0][f], field_a, x);
            sum[0][1][f] = dot(sum[0][1][f], field_b, x);
            sum[1][0][f] = dot(sum[1][0][f], field_a, y);
            sum[1][1][f] = dot(sum[1][1][f], field_b, y);
        }
        tile += BN_TILE_BYTES, next += BN_TILE_BYTES, ahead += 2 * BN_TILE_BYTES;
        q += BN_TERNARY_TILE_K;
    }
    UNROLL
    for (size_t t = 0; t < 2; t++) {
        int32_t *acc = m->acc + t * m->acc_stride + panel * BN_PANEL;
        sums_store(acc, ternary_total(sum[t][0]));
        sums_store(acc + BN_PANEL, ternary_total(sum[t][1]));
    }
}

/* At least two tokens, in blocks of nearly equal size, and the first `panels` panels. Returns how
 * many panels are done: the largest multiple of four. */
INLINE size_t panels_tokens(const bn_matmul *m, const bn_scaling *to, size_t panels, dot_fn *dot) {
    _Alignas(64) uint8_t kept[KEPT_TILES * 4 * BLOCK_PANELS * sizeof(bytes)];
    const size_t blocks = (m->tokens + 5) / 6;
    const int keeps = blocks > 1 && bn_like_intel;
    const size_t step = keeps ? KEPT_TILES : m->k_tiles;
    size_t p = 0;
    for (; p + BLOCK_PANELS <= panels; p += BLOCK_PANELS)
        for (size_t k = 0; k < m->k_tiles; k += step) {
            const uint8_t *panel = m->tiles + p * m->panel_stride;
            const int last = k + step >= m->k_tiles;
            const four_panels w = {.tile = panel + k * BN_TILE_BYTES,
                                   .stride = m->panel_stride,
                                   .tiles = bn_min(step, m->k_tiles - k),
                                   .next = last ? panel + BLOCK_PANELS * m->panel_stride
                                                : panel + (k + step) * BN_TILE_BYTES,
                                   .more = k > 0};
            for (size_t b = 0; b < blocks; b++) {
                const size_t t = m->tokens * b / blocks, row = p * BN_PANEL;
                int32_t *acc = m->acc + t * m->acc_stride + row;
                const int8_t *q = m->q + t * m->q_stride + k * BN_TERNARY_TILE_K;
                const bn_scaling *floats = last ? to : NULL;
#define FROM(from, T)                                                                              \
    ternary_panels(acc, m->acc_stride, floats, row, t, &w, kept, q, m->q_stride, dot, from, T)
#define BLOCK(T)                                                                                   \
    case T:                                                                                        \
        if (!keeps)                                                                                \
            FROM(FROM_TILES, T);                                                                   \
        else if (b == 0)                                                                           \
            FROM(FROM_TILES_TO_KEEP, T);                                                           \
        else                                                                                       \
            FROM(FROM_KEPT, T);                                                                    \
        break
                BY_TOKENS(m->tokens * (b + 1) / blocks - t, BLOCK)
#undef BLOCK
#undef FROM
            }
        }
    return p;
}

#endif
