/* SPDX-License-Identifier: MIT
 *
 * check_attention.h: the attention kernels of every cache type.
 */
#ifndef BITNET_TESTS_CHECK_ATTENTION_H
#define BITNET_TESTS_CHECK_ATTENTION_H

#include "kv.h"
#include "test.h"

/* n random elements of a type. */
typedef const void *numbers_fn(test *t, size_t n, int kind);

static const void *numbers_f16(test *t, size_t n, int kind) {
    return halves(t, n, kind);
}

static const void *numbers_f32(test *t, size_t n, int kind) {
    return floats(t, n, kind);
}

/* int8 codes, sometimes all at one end of their range. */
static const void *numbers_int8(test *t, size_t n, int kind) {
    int8_t *c = buffer(t, n);
    const int end = (int)below(t, 4);
    (void)kind;
    for (size_t i = 0; i < n; i++)
        c[i] = (int8_t)(end == 0 ? 127 : end == 1 ? -127 : (int)below(t, 255) - 127);
    return c;
}

/* The same for 4-bit codes, two per byte. */
static const void *numbers_nibbles(test *t, size_t n, int kind) {
    uint8_t *c = buffer(t, n / 2);
    const int end = (int)below(t, 4);
    (void)kind;
    for (size_t i = 0; i < n / 2; i++)
        c[i] = (uint8_t)(end == 0 ? 255 : end == 1 ? 0 : below(t, 256));
    return c;
}

static numbers_fn *const keys_of[BN_KV_TYPES] = {[BN_KV_F16] = numbers_f16,
                                                 [BN_KV_F32] = numbers_f32,
                                                 [BN_KV_INT8] = numbers_int8,
                                                 [BN_KV_K4V8] = numbers_nibbles};
static numbers_fn *const values_of[BN_KV_TYPES] = {[BN_KV_F16] = numbers_f16,
                                                   [BN_KV_F32] = numbers_f32,
                                                   [BN_KV_INT8] = numbers_int8,
                                                   [BN_KV_K4V8] = numbers_int8};

/* Dimensions of a head: often a whole number of 64, which some tiers multiply differently. */
static size_t head_to(test *t, size_t n) {
    return below(t, 3) == 0 ? 64 * size_to(t, 3) : size_to(t, n);
}

/* Word w of a tile holds the scales of its 16 keys. */
static int holds_scales(const bn_kv *kv, size_t w, size_t words) {
    const size_t every = kv->scaled ? kv->scaled / kv->dims + 1 : 0;
    return kv->scaled && (w == words - 1 || w % every == every - 1);
}

/* Tiles of keys, including their scales, which are floats of the given kind. */
static const void *random_keys(test *t, int32_t type, size_t tiles, size_t E, int kind) {
    const bn_kv *kv = &bn_kv_types[type];
    const size_t words = bn_kv_words(kv, E), n = words * BN_LANES * kv->word;
    uint8_t *k = (uint8_t *)(uintptr_t)keys_of[type](t, tiles * n * kv->dims / kv->word, kind);
    for (size_t tile = 0; tile < tiles; tile++)
        for (size_t w = 0; w < words; w++)
            for (size_t key = 0; holds_scales(kv, w, words) && key < BN_LANES; key++) {
                const float scale = random_float(t, kind);
                memcpy(k + tile * n + (w * BN_LANES + key) * sizeof scale, &scale, sizeof scale);
            }
    return k;
}

enum { KV_TIMED_KEYS = 256, KV_TIMED_DIM = 128 }; /* a chunk of a typical head */

/* Up to four queries that share a KV head, and 32 as in a prompt; bytes: of a key or a value. */
static void time_keys(bench *b, const char *what, void (*call)(bench *), size_t bytes) {
    char name[32];
    snprintf(name, sizeof name, "%s_%s", what, bn_kv_name(b->type));
    b->rows = KV_TIMED_KEYS, b->cols = KV_TIMED_DIM;
    const double kv = (double)(b->rows * b->cols);
    static const size_t queries[] = {1, 2, 4, 32};
    for (size_t i = 0; i < sizeof queries / sizeof *queries; i++) {
        b->tokens = queries[i];
        bench_line(b, name, call, kv * (double)b->tokens, (double)(b->rows * bytes));
    }
}

/* --- qk --- */

static void check_qk(test *t, int32_t type, const char *what) {
    const bn_kv *kv = &bn_kv_types[type];
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n_q = size_to(t, 40), tiles = size_to(t, 5);
    const size_t E = head_to(t, kv->encode_query && below(t, 16) == 0 ? 1024 : 160);
    const size_t stride = tiles * BN_LANES + below(t, 20);
    const size_t n_s = (n_q - 1) * stride + tiles * BN_LANES;
    bn_qk a = {.score_stride = stride, .n_q = n_q, .head_dim = E, .tiles = tiles};
    if (kv->encode_query) {
        int8_t *codes = (int8_t *)(uintptr_t)numbers_int8(t, n_q * bn_q_row(E), kind);
        for (size_t i = 0; i < n_q; i++)
            memset(codes + i * bn_q_row(E) + E, 0, bn_q_row(E) - E);
        a.codes = codes, a.q_scale = floats(t, n_q, kind);
    } else {
        a.q = floats(t, n_q * E, kind);
    }
    a.k = random_keys(t, type, tiles, E, kind);
    float *s[2];
    for (int i = 0; i < 2; i++) {
        a.scores = s[i] = buffer(t, n_s * sizeof(float));
        (i ? t->scalar : t->tier)->attention[type].qk(&a);
    }
    same_floats(t, s[0], s[1], n_s, what);
    done(t, what);
}

static void call_qk(bench *b) {
    b->k->attention[b->type].qk(&(bn_qk){.scores = b->y,
                                         .score_stride = b->rows,
                                         .q = b->x,
                                         .codes = b->q,
                                         .q_scale = b->x,
                                         .n_q = b->tokens,
                                         .k = b->weights,
                                         .head_dim = b->cols,
                                         .tiles = b->rows / BN_LANES});
}

/* Scales as ordinary as those of a cache: products with denormal numbers take a hundred cycles. */
static void time_qk(bench *b) {
    const bn_kv *kv = &bn_kv_types[b->type];
    const size_t words = bn_kv_words(kv, KV_TIMED_DIM), word = BN_LANES * kv->word;
    for (size_t w = 0; w < words * (KV_TIMED_KEYS / BN_LANES); w++)
        if (holds_scales(kv, w % words, words))
            memset(b->weights + w * word, 0x3f, word); /* 0.75, as floats or as two halves */
    time_keys(b, "qk", call_qk, bn_kv_key(&bn_kv_types[b->type], KV_TIMED_DIM));
}

/* --- pv --- */

/* weigh, and pv of a type with quantized values. */
static void check_weighed(test *t, int32_t type, const char *what) {
    const size_t n_q = size_to(t, 40), E = head_to(t, 160), keys = BN_LANES * size_to(t, 16);
    const size_t stride = 2 * keys + 4 * below(t, 5), n_out = n_q * E;
    const size_t low = below(t, 3) ? 0 : below(t, keys), high = low + size_to(t, keys - low);
    const int kind = (int)below(t, FLOAT_KINDS);
    const int8_t *v = values_of[type](t, keys * E, kind);
    int32_t *sums[2], start = (int32_t)below(t, 1000) - 500;
    uint8_t *codes[2];
    float *w[2], back[2];
    const float *scale = floats(t, keys, kind), *weights = floats(t, keys, kind);
    for (int i = 0; i < 2; i++) {
        const bn_attention_kernels *kernels = &(i ? t->scalar : t->tier)->attention[type];
        codes[i] = buffer(t, n_q * stride), sums[i] = buffer(t, n_out * sizeof **sums);
        w[i] = buffer(t, keys * sizeof **w);
        for (size_t j = 0; j < keys; j++)
            w[i][j] = fabsf(weights[j]), ((float *)(uintptr_t)scale)[j] = fabsf(scale[j]);
        uint8_t *to = below(t, 2) ? codes[i] : (uint8_t *)w[i];
        back[i] = kernels->weigh(to, w[i], scale, low, high, keys);
        memmove(codes[i], to, 2 * keys);
        for (size_t j = 0; j < n_out; j++)
            sums[i][j] = start;
    }
    same_floats(t, &back[0], &back[1], 1, what);
    same_bytes(t, codes[0], codes[1], 2 * keys, what);
    for (size_t i = 1; i < n_q; i++)
        for (size_t j = 0; j < 2 * keys; j++)
            codes[0][i * stride + j] = (uint8_t)below(t, 128);
    for (int i = 0; i < 2; i++)
        (i ? t->scalar : t->tier)
            ->attention[type]
            .pv(&(bn_pv){.sums = sums[i],
                         .codes = codes[0],
                         .p_stride = stride,
                         .n_q = n_q,
                         .v = v,
                         .head_dim = E,
                         .keys = keys});
    same_bytes(t, sums[0], sums[1], n_out * sizeof **sums, what);
    done(t, what);
}

static void check_pv(test *t, int32_t type, const char *what) {
    if (t->scalar->attention[type].weigh) {
        check_weighed(t, type, what);
        return;
    }
    const int kind = (int)below(t, FLOAT_KINDS);
    const size_t n_q = size_to(t, 40), head_dim = head_to(t, 160), keys = size_to(t, 40);
    const size_t stride = keys + below(t, 5), n_out = n_q * head_dim;
    const float *start = floats(t, n_out, kind);
    bn_pv a = {.p = floats(t, (n_q - 1) * stride + keys, kind),
               .p_stride = stride,
               .n_q = n_q,
               .v = values_of[type](t, keys * head_dim, kind),
               .head_dim = head_dim,
               .keys = keys};
    float *out[2];
    for (int i = 0; i < 2; i++) {
        a.out = out[i] = buffer(t, n_out * sizeof(float));
        memcpy(out[i], start, n_out * sizeof(float));
        (i ? t->scalar : t->tier)->attention[type].pv(&a);
    }
    same_floats(t, out[0], out[1], n_out, what);
    done(t, what);
}

static void call_pv(bench *b) {
    b->k->attention[b->type].pv(&(bn_pv){.out = b->y,
                                         .p = b->x,
                                         .sums = (int32_t *)(void *)b->y,
                                         .codes = (const uint8_t *)b->q,
                                         .p_stride = b->rows,
                                         .n_q = b->tokens,
                                         .v = b->weights,
                                         .head_dim = b->cols,
                                         .keys = b->rows});
}

static void time_pv(bench *b) {
    time_keys(b, "pv", call_pv, bn_kv_value(&bn_kv_types[b->type], KV_TIMED_DIM));
}

#endif
