/* SPDX-License-Identifier: MIT
 *
 * trit_stream.h: weights of five trits a byte times up to STREAM_TOKENS tokens with vpdpbusd, one
 * linear stream and no decoding. A byte v is multiplied with the activations of its first column,
 * then 3v with those of the next, and so on; 256 times a code is 3 times its v less the next v
 * (FORMAT.md §4), so two sums give the product.
 *
 * Defined before including: what stream.h wants, and stream.h.
 */
typedef uint8_t octets __attribute__((vector_size(sizeof(bytes))));
typedef uint32_t wraps __attribute__((vector_size(sizeof(sums))));

INLINE bytes three_times(bytes v) {
    return (bytes)((octets)v + (octets)v + (octets)v);
}

/* (3a - b) / 256 modulo 2^32. */
INLINE sums trit_total(sums a, sums b) {
    return sums_shr((sums)(3 * (wraps)a - (wraps)b), 8);
}

/* The rows of one register, T tokens. Each sum is in PARTS parts, so that there are about as many
 * as hide the latency of the instruction and registers hold. */
INLINE void trit_stream(int32_t *acc, size_t acc_stride, const uint8_t *tile, size_t tiles,
                        const int8_t *q, size_t q_stride, const int T, const int PARTS_OF_SUM) {
    sums a[6][5], b[6][5];
#define CLEAR(t)                                                                                   \
    a[t][0] = a[t][1] = a[t][2] = a[t][3] = a[t][4] = sums_zero();                                 \
    b[t][0] = b[t][1] = b[t][2] = b[t][3] = b[t][4] = sums_zero();
    EACH_TOKEN(CLEAR)
#undef CLEAR
    for (; tiles > 0; tiles--, tile += BN_TILE_BYTES, q += BN_TRIT_TILE_K) {
        prefetch(tile);
        bytes v = bytes_load(tile), next;
#define DOT(t, f)                                                                                  \
    if (t < T) {                                                                                   \
        const bytes x = bytes_spread(q + t * q_stride + 4 * f);                                    \
        a[t][f % PARTS_OF_SUM] = sums_dot(a[t][f % PARTS_OF_SUM], v, x);                           \
        b[t][f % PARTS_OF_SUM] = sums_dot(b[t][f % PARTS_OF_SUM], next, x);                        \
    }
#define FIELD(f)                                                                                   \
    next = three_times(v);                                                                         \
    EACH_TOKEN_AND(DOT, f)                                                                         \
    v = next;
        FIELD(0)
        FIELD(1)
        FIELD(2)
        FIELD(3)
        FIELD(4)
#undef FIELD
#undef DOT
    }
#define PUT(t)                                                                                     \
    if (t < T)                                                                                     \
        sums_store(acc + t * acc_stride,                                                           \
                   trit_total(a[t][0] + a[t][1] + a[t][2] + a[t][3] + a[t][4],                     \
                              b[t][0] + b[t][1] + b[t][2] + b[t][3] + b[t][4]));
    EACH_TOKEN(PUT)
#undef PUT
}

static void trit_few(const bn_matmul *m) {
    for (size_t p = 0; p < m->panels; p++)
        for (size_t row = 0; row < BN_PANEL; row += VEC_ROWS) {
            const uint8_t *tile = m->tiles + p * m->panel_stride + 4 * row;
            int32_t *acc = m->acc + p * BN_PANEL + row;
#define TOKENS(T, parts)                                                                           \
    case T:                                                                                        \
        if (T <= STREAM_TOKENS)                                                                    \
            trit_stream(acc, m->acc_stride, tile, m->k_tiles, m->q, m->q_stride, T, parts);        \
        break
            switch (m->tokens) {
                TOKENS(1, 5);
                TOKENS(2, 2);
                TOKENS(3, 2);
                TOKENS(4, 2);
                TOKENS(5, 2);
                TOKENS(6, 2);
            }
#undef TOKENS
        }
}
