/* SPDX-License-Identifier: MIT
 *
 * tile_cache.h: attention of many queries to an int8 cache with AMX. The layouts of keys and values
 * are those of weight tiles (attention.h), so the cache is multiplied as it is stored: 64
 * dimensions of 16 keys form a tile, and 64 keys in 16 dimensions.
 */
#ifndef BITNET_X86_TILE_CACHE_H
#define BITNET_X86_TILE_CACHE_H

#include "tile_codes.h"

/* Scores of a block of queries with P tiles of keys. */
INLINE void qk_block(const bn_qk *a, const token_block *at, size_t tile, const int T, const int P) {
    const size_t E = a->head_dim, tile_bytes = (E / 4 + 1) * TILE_COLUMNS; /* scales come last */
    const size_t size = tile_tokens(a->n_q), q_row = bn_q_row(E);
    const uint8_t *k = (const uint8_t *)a->k + tile * tile_bytes;
    const int8_t *q = a->codes + at->first * q_row;
    _Alignas(64) block_sums sums_of;
    clear_sums();
    for (size_t d = 0; d < E; d += STEP_K)
        multiply_step(q + d, q + at->apart * q_row + d, q_row, k + d * BN_PANEL, tile_bytes, T, P);
    store_sums(sums_of, T, P);
    vec scale[PAIR];
    UNROLL
    for (size_t p = 0; p < (size_t)P; p++)
        scale[p] = vec_load((const float *)(const void *)(k + p * tile_bytes + E * BN_PANEL));
    for (size_t i = 0; i < at->apart + size; i++) {
        const size_t t = i >= size, row = t ? i - at->apart : i, query = at->first + i;
        const vec q_scale = vec_set(a->q_scale[query]);
        float *scores = a->scores + query * a->score_stride + tile * BN_LANES;
        UNROLL
        for (size_t p = 0; p < (size_t)P; p++)
            vec_store(scores + p * BN_LANES, vec_mul(vec_from_int(sums_load(sums_of[t][p][row])),
                                                     vec_mul(q_scale, scale[p])));
    }
}

/* head_dim is a multiple of STEP_K. */
INLINE void qk_tiles(const bn_qk *a) {
    const size_t size = a->tiles * (a->head_dim / 4 + 1) * TILE_COLUMNS;
    tiles_for(a->n_q);
    for (size_t at = 0; at < size; at += TILE_COLUMNS)
        _mm_prefetch((const char *)a->k + a->ahead + at, _MM_HINT_T1);
    for (size_t b = 0; b < token_blocks(a->n_q); b++) {
        const token_block at = token_block_of(a->n_q, b);
        for (size_t t = 0; t < a->tiles; t += PAIR) {
#define BLOCK(T, P) qk_block(a, &at, t, T, P)
            EACH_SHAPE(BLOCK, at.two, t + PAIR <= a->tiles)
#undef BLOCK
        }
    }
    tiles_release();
}

/* The weights of a tile of queries and 64 keys, [upper and lower part][query][key]. */
typedef uint8_t weight_tiles[2][TILE_ROWS][TILE_COLUMNS];

/* Collects the parts, of which 16 of each alternate. */
INLINE void split_weights(weight_tiles to, const uint8_t *codes, size_t stride, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const __m512i a = _mm512_loadu_si512(codes + i * stride);
        const __m512i b = _mm512_loadu_si512(codes + i * stride + 64);
        _mm512_storeu_si512(to[0][i], _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(to[1][i], _mm512_shuffle_i32x4(a, b, 0xdd));
    }
}

/* Adds to the sums of n queries, from row `skip` on, in 32 dimensions. v: the values of 64 keys. */
INLINE void pv_block(int32_t *out, size_t head_dim, weight_tiles w, const int8_t *v, size_t skip,
                     size_t n) {
    _Alignas(64) block_sums sums_of; /* [part][16 dimensions] */
    clear_sums();
    tile_load(4, w[0], TILE_COLUMNS);
    tile_load(5, w[1], TILE_COLUMNS);
    tile_load(6, v, 4 * head_dim);
    tile_load(7, v + TILE_COLUMNS, 4 * head_dim);
    tile_dot(0, 4, 6);
    tile_dot(1, 4, 7);
    tile_dot(2, 5, 6);
    tile_dot(3, 5, 7);
    store_sums(sums_of, 2, PAIR);
    for (size_t i = skip; i < n; i++) {
        UNROLL
        for (size_t p = 0; p < PAIR; p++) {
            int32_t *sum = out + i * head_dim + p * BN_PANEL;
            const sums high = sums_load(sums_of[0][p][i]) << BN_WEIGHT_LOW;
            sums_store(sum, sums_add(sums_load(sum), sums_add(high, sums_load(sums_of[1][p][i]))));
        }
    }
}

/* head_dim is a multiple of 32, keys of 64. */
INLINE void pv_tiles(const bn_pv *a) {
    const size_t E = a->head_dim, size = tile_tokens(a->n_q), n = token_tiles(a->n_q);
    _Alignas(64) weight_tiles w;
    tiles_for(a->n_q);
    for (size_t at = 0; at < a->keys * E; at += TILE_COLUMNS)
        _mm_prefetch((const char *)a->v + a->ahead + at, _MM_HINT_T1);
    for (size_t key = 0; key < a->keys; key += TILE_COLUMNS)
        for (size_t t = 0; t < n; t++) { /* the last tile may begin within the one before it */
            const size_t first = bn_min(t * size, a->n_q - size), skip = t * size - first;
            split_weights(w, a->codes + first * a->p_stride + 2 * key, a->p_stride, size);
            for (size_t d = 0; d < E; d += 2 * BN_PANEL)
                pv_block(a->sums + first * E + d, E, w, (const int8_t *)a->v + key * E + 4 * d,
                         skip, size);
        }
    tiles_release();
}

#endif
