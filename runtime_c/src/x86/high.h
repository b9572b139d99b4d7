/* SPDX-License-Identifier: MIT
 *
 * high.h: the high plane of the head alone, for the tiers with vpdpbusd. The upper halves of
 * the bytes are multiplied where they lie and so count 16 times, which is what is wanted.
 *
 * Defined before including: what stream.h wants.
 */
INLINE void high_columns(sums sum[2], const uint8_t *tile, const int8_t *q) {
    const bytes v = bytes_load(tile);
    sum[0] = sums_dot(sum[0], bytes_and(v, bytes_fill(0x0f)), bytes_spread(q));
    sum[1] = sums_dot(sum[1], bytes_and(v, bytes_fill(0xf0)), bytes_spread(q + 4));
}

static void int8_high(const bn_matmul *m) {
    for (size_t p = 0; p < m->panels; p++) {
        const uint8_t *tile = m->tiles + p * m->panel_stride;
        const int8_t *q = m->q;
        sums even[TILE_VECS][2], odd[TILE_VECS][2];
        UNROLL
        for (int v = 0; v < TILE_VECS; v++)
            even[v][0] = even[v][1] = odd[v][0] = odd[v][1] = sums_zero();
        size_t k = 0;
        for (; k + 2 <= m->k_tiles; k += 2, tile += 2 * BN_TILE_BYTES, q += 2 * BN_INT8_TILE_K) {
            UNROLL
            for (size_t v = 0; v < TILE_VECS; v++) {
                high_columns(even[v], tile + v * sizeof(bytes), q);
                high_columns(odd[v], tile + BN_TILE_BYTES + v * sizeof(bytes), q + BN_INT8_TILE_K);
            }
        }
        UNROLL
        for (size_t v = 0; v < TILE_VECS; v++) {
            if (k < m->k_tiles)
                high_columns(even[v], tile + v * sizeof(bytes), q);
            sums_store(m->acc + p * BN_PANEL + v * VEC_ROWS,
                       (sums_add(even[v][0], odd[v][0]) << 4) + sums_add(even[v][1], odd[v][1]));
        }
    }
}
