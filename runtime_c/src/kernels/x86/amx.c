/* SPDX-License-Identifier: MIT
 *
 * amx.c: int8 products of AMX tiles on top of AVX-512. One instruction multiplies up to 16 tokens
 * with 16 rows, 64 columns of each, as much as 256 of AVX-512-VNNI, in the time of 32.
 *
 * What it wants of weights, four columns of 16 rows side by side, is what a field of a weight tile
 * is (FORMAT.md §4). So four weight tiles, unpacked to a byte a code, are one of its tiles, and
 * activations are taken as they lie.
 *
 * Four tiles of sums, 2 of tokens × 2 panels, take turns, as an instruction waits 52 cycles for its
 * own sums and 16 for another's. Codes go through memory, as tiles are loaded from nowhere else:
 * through a part of the first cache. One core multiplies 3,080 G codes a second from registers, and
 * in these blocks 1,600, 97 cycles of a step in place of 64: what is in no cache that is near, and
 * sums that come and go with each part of the columns. Tried on that machine (family 6, model 167,
 * 2 MB of second cache), 128 tokens: parts of 14, 20 or 28 steps 5 to 25 % slower; activations
 * asked for one to four steps early 2 to 7 % slower; a part of 8 or 16 panels at a time 5 to 9 %
 * slower.
 */
#include "../kernels.h"

#if defined(__AVX512VNNI__) && (defined(__AMX_INT8__) || defined(BITNET_AMX_IN_C))

#define REGISTER_BITS 512
#include "../groups.h"
#include "amx.h"
#include "integer.h"
#include "scale.h"
#include "tiles.h"
#include "trits.h"

enum {
    STEP_TILES = 4,                          /* weight tiles that make a tile */
    STEP_K = STEP_TILES * BN_TERNARY_TILE_K, /* columns of it */
    PAIR = 2,                                /* panels, and tiles of tokens, of a block */
    PART_STEPS = 10,                         /* unpacked at a time: 20 kB */
    EARLY = 3,                               /* steps that are unpacked before they are loaded */
    FEW = 6,
    FEW_OF_TRITS = 12, /* tokens that AVX-512-VNNI takes */
    GROUP_TOKENS = 128 /* whose activations stay in the second cache */
};

/* Some columns of one or two panels. */
typedef struct part {
    const uint8_t *tiles;  /* of the first panel */
    size_t stride;         /* to the second */
    const uint8_t *ahead;  /* the next panels, as they lie in memory */
    size_t n_tiles, steps; /* weight tiles, and tiles of codes that they make */
    uint8_t *codes;        /* [step][panel][TILE_SIZE] */
    int more;              /* products of other columns are in acc: these are added */
} part;

/* A tile of codes from four weight tiles, or from what is left of them, and zeros. */
INLINE void unpack_tiles(uint8_t *codes, const uint8_t *tiles, const uint8_t *ahead, size_t n) {
    const bytes three = bytes_fill(3);
    UNROLL
    for (size_t i = 0; i < STEP_TILES; i++, codes += 4 * sizeof(bytes)) {
        const bytes c = i < n ? bytes_load(tiles + i * BN_TILE_BYTES) : bytes_fill(0);
        prefetch_from_memory(ahead + i * BN_TILE_BYTES);
        prefetch_from_second_cache(tiles + i * BN_TILE_BYTES + NEAR);
        bytes_store(codes, bytes_and(c, three));
        bytes_store(codes + sizeof(bytes), bytes_and(bytes_shr(c, 2), three));
        bytes_store(codes + 2 * sizeof(bytes), bytes_and(bytes_shr(c, 4), three));
        bytes_store(codes + 3 * sizeof(bytes), bytes_and(bytes_shr(c, 6), three));
    }
}

INLINE void unpack_step(const part *w, size_t step, const size_t P) {
    const size_t n = w->n_tiles - step * STEP_TILES;
    UNROLL
    for (size_t p = 0; p < P; p++) {
        uint8_t *codes = w->codes + (step * PAIR + p) * TILE_SIZE;
        const uint8_t *tiles = w->tiles + p * w->stride + step * STEP_TILES * BN_TILE_BYTES;
        const uint8_t *ahead = w->ahead + (step * P + p) * STEP_TILES * BN_TILE_BYTES;
        if (n >= STEP_TILES)
            unpack_tiles(codes, tiles, ahead, STEP_TILES);
        else
            unpack_tiles(codes, tiles, ahead, n);
    }
}

/* acc (+)= products of T tiles of tokens, the second `apart` tokens behind the first, and P panels.
 * unpacked: by an earlier block. Tiles 2 t + p are sums, 4 + t activations, 6 + p codes. */
INLINE void multiply_block(int32_t *acc, size_t acc_stride, const int8_t *q, size_t q_stride,
                           size_t apart, const part *w, const int unpacked, const int T,
                           const int P) {
    const size_t row = acc_stride * sizeof *acc;
    int32_t *acc_1 = acc + apart * acc_stride;
    const int8_t *q_1 = q + apart * q_stride;
    const uint8_t *codes = w->codes;
#define SUMS(tile, t, p, how)                                                                      \
    if (t < T && p < P)                                                                            \
        how(tile, (t ? acc_1 : acc) + p * BN_PANEL, row);
#define EACH_SUM(how) SUMS(0, 0, 0, how) SUMS(1, 0, 1, how) SUMS(2, 1, 0, how) SUMS(3, 1, 1, how)
#define CLEAR(tile, at, stride) tile_zero(tile)
    if (w->more) {
        EACH_SUM(tile_load)
    } else {
        EACH_SUM(CLEAR)
    }
    for (size_t s = 0; !unpacked && s < bn_min(EARLY, w->steps); s++)
        unpack_step(w, s, (size_t)P);
    for (size_t s = 0; s < w->steps; s++, codes += PAIR * TILE_SIZE, q += STEP_K, q_1 += STEP_K) {
        if (!unpacked && s + EARLY < w->steps)
            unpack_step(w, s + EARLY, (size_t)P);
        tile_load_once(4, q, q_stride);
        tile_load(6, codes, TILE_COLUMNS);
        tile_dot_unsigned(0, 4, 6);
        if (P > 1) {
            tile_load(7, codes + TILE_SIZE, TILE_COLUMNS);
            tile_dot_unsigned(1, 4, 7);
        }
        if (T > 1) {
            tile_load_once(5, q_1, q_stride);
            tile_dot_unsigned(2, 5, 6);
            if (P > 1)
                tile_dot_unsigned(3, 5, 7);
        }
    }
    EACH_SUM(tile_store)
#undef CLEAR
#undef EACH_SUM
#undef SUMS
}

static size_t token_tiles(size_t tokens) {
    return (tokens + TILE_ROWS - 1) / TILE_ROWS;
}

static size_t tile_tokens(size_t tokens) {
    const size_t n = token_tiles(tokens);
    return (tokens + n - 1) / n;
}

/* Tiles of tokens are of one size. Where it takes that the last two overlap, in one block, which
 * writes the same sums twice; an odd one is the first. */
INLINE void multiply_part(const bn_matmul *m, size_t panel, size_t k, const part *w, const int P) {
    const size_t n = token_tiles(m->tokens), size = tile_tokens(m->tokens);
    for (size_t i = 0, next; i < n; i = next) {
        next = i + (i == 0 && n % 2 ? 1 : 2);
        const size_t first = i * size, apart = next == n ? m->tokens - size - first : size;
        int32_t *acc = m->acc + first * m->acc_stride + panel * BN_PANEL;
        const int8_t *q = m->q + first * m->q_stride + k;
#define BLOCK(unpacked, T)                                                                         \
    multiply_block(acc, m->acc_stride, q, m->q_stride, apart, w, unpacked, T, P)
        if (next == i + 1)
            BLOCK(0, 1);
        else if (i == 0)
            BLOCK(0, 2);
        else
            BLOCK(1, 2);
#undef BLOCK
    }
}

INLINE void multiply_panels(const bn_matmul *m, size_t panel, uint8_t *codes, const int P) {
    const size_t steps = (m->k_tiles + STEP_TILES - 1) / STEP_TILES;
    const size_t parts = (steps + PART_STEPS - 1) / PART_STEPS;
    const uint8_t *tiles = m->tiles + panel * m->panel_stride;
    for (size_t i = 0; i < parts; i++) {
        const size_t step = steps * i / parts, stop = steps * (i + 1) / parts;
        const size_t from = step * STEP_TILES, to = bn_min(stop * STEP_TILES, m->k_tiles);
        const part w = {.tiles = tiles + from * BN_TILE_BYTES,
                        .stride = m->panel_stride,
                        .ahead = tiles + (size_t)P * (m->panel_stride + from * BN_TILE_BYTES),
                        .n_tiles = to - from,
                        .steps = stop - step,
                        .codes = codes,
                        .more = i > 0};
        multiply_part(m, panel, step * STEP_K, &w, P);
    }
}

/* At most GROUP_TOKENS. */
static void multiply_group(const bn_matmul *m) {
    _Alignas(64) uint8_t codes[PART_STEPS * PAIR * TILE_SIZE];
    const uint8_t size = (uint8_t)tile_tokens(m->tokens), all = TILE_ROWS;
    size_t p = 0;
    tiles_configure((const uint8_t[TILE_REGISTERS]){size, size, size, size, size, size, all, all});
    for (; p + PAIR <= m->panels; p += PAIR)
        multiply_panels(m, p, codes, PAIR);
    if (p < m->panels)
        multiply_panels(m, p, codes, 1);
    tiles_release();
}

/* The tokens of group i of n. */
static bn_matmul group_of(const bn_matmul *m, size_t i, size_t n) {
    const size_t first = m->tokens * i / n;
    bn_matmul group = *m;
    group.acc += first * m->acc_stride;
    group.q += first * m->q_stride;
    group.tokens = m->tokens * (i + 1) / n - first;
    return group;
}

static size_t groups_of(size_t tokens) {
    return (tokens + GROUP_TOKENS - 1) / GROUP_TOKENS;
}

static void ternary_matmul(const bn_matmul *m) {
    const size_t n = groups_of(m->tokens);
    if (m->tokens <= FEW) {
        bn_avx512vnni.ternary_matmul(m);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const bn_matmul group = group_of(m, i, n);
        multiply_group(&group);
    }
}

static void ternary_scaled(const bn_matmul *m, const bn_scaling *a) {
    const size_t n = groups_of(m->tokens);
    if (m->tokens <= FEW) {
        bn_avx512vnni.ternary_scaled(m, a);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const size_t first = m->tokens * i / n;
        const bn_matmul group = group_of(m, i, n);
        bn_scaling of = *a;
        of.y += first * a->y_stride;
        of.acc += first * a->acc_stride;
        of.q_sums = a->q_sums ? a->q_sums + first : NULL;
        of.s += first;
        of.tokens = group.tokens;
        multiply_group(&group);
        scale_from(&of, 0);
    }
}

static void trit_matmul(const bn_matmul *m) {
    if (m->tokens <= FEW_OF_TRITS)
        bn_avx512vnni.trit_matmul(m);
    else
        trits_many(m, ternary_matmul);
}

/* See groups.h. */
INLINE void add_group(float *y, const int32_t *acc, const int32_t *q_sums, size_t q_sums_stride,
                      const uint16_t *scales, size_t tokens) {
    const vec scale = vec_widen(scales);
    for (; tokens > 0; tokens--, y += BN_PANEL, acc += BN_PANEL, q_sums += q_sums_stride)
        vec_store(y, vec_fma(vec_from_int(sums_load(acc) - *q_sums), scale, vec_load(y)));
}

static void ternary_grouped(const bn_grouped *m) {
    if (m->tokens <= TILE_ROWS)
        bn_avx512vnni.ternary_grouped(m);
    else
        grouped_by(m, multiply_group, add_group);
}

/* Four sums that take turns, as in a block. */
static uint64_t int8_peak(uint64_t rounds, int32_t *sink) {
    static const uint8_t some[TILE_SIZE] = {1, 2, 3};
    _Alignas(64) int32_t sums_of[TILE_SIZE / sizeof(int32_t)];
    const uint8_t all = TILE_ROWS;
    tiles_configure((const uint8_t[TILE_REGISTERS]){all, all, all, all, all, all, all, all});
    tile_load(4, some, TILE_COLUMNS);
    tile_load(6, some, TILE_COLUMNS);
    for (uint64_t i = 0; i < rounds; i++) {
        tile_dot_unsigned(0, 4, 6);
        tile_dot_unsigned(1, 4, 6);
        tile_dot_unsigned(2, 4, 6);
        tile_dot_unsigned(3, 4, 6);
    }
    tile_store(0, sums_of, TILE_COLUMNS);
    tiles_release();
    *sink = sums_of[0];
    return rounds * 4 * TILE_ROWS * TILE_SIZE;
}

int bn_kernels_amx(bn_kernels *table) {
    table->products.ternary_matmul = ternary_matmul;
    table->products.ternary_scaled = ternary_scaled;
    table->products.sketch_matmul = ternary_matmul;
    table->products.trit_matmul = trit_matmul;
    table->products.ternary_grouped = ternary_grouped;
    table->products.int8_peak = int8_peak;
    return 1;
}

#else
BN_ABSENT_TIER(bn_kernels_amx)
#endif
