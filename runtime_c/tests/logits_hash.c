/* SPDX-License-Identifier: MIT
 *
 * logits_hash.c: checks the header's promise of determinism end to end. A fixed list of tokens is
 * run through a model on every tier that this CPU supports, with one and several threads, in long
 * and short pieces; the CRC-32 of the bits of all logits, session digests and sampled tokens must
 * not change. It is printed, so that machines can be compared.
 *
 *     logits_hash [FILE]      without FILE, small random models
 *     logits_hash --brief     the best tier takes one way in turn: for CPUs that are emulated
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "bitnet_runtime.h"

#include <math.h>

#include "tiny_file.h"

enum { TOKENS = 270, LONGEST = 100 }; /* more tokens than an attention chunk has keys */
enum { PRE_NORM = 1, POST_NORM = 2, SUB_NORM = 4, LINEAR_NORM = 8, QK_NORM = 32 };
enum { RELU2, SILU, GELU };

/* No size is a multiple of 16; every encoding and every scope of scales occurs. */
enum { DIM = 90, HEAD = 20, HEADS = 2, KV_HEADS = 1, FFN = 140, VOCAB = 101, LAYERS = 2 };
enum { TALL_FFN = 700, TALL_VOCAB = 3000 }; /* enough rows for lookup.c; more in the head */

static void layer(tiny_writer *w, unsigned l, unsigned norms) {
    if (norms & PRE_NORM)
        tiny_tensor(w, l, 1, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, l, 2, TINY_NONE, 0, 4, 2, HEADS * HEAD, DIM);
    tiny_tensor(w, l, 3, TINY_NONE, 0, 2, 0, KV_HEADS * HEAD, DIM);
    tiny_tensor(w, l, 4, TINY_NONE, 0, l == 0 ? 1 : 4, l == 0 ? 0 : 1, KV_HEADS * HEAD, DIM);
    for (unsigned role = 5; role <= 6 && norms & QK_NORM; role++)
        tiny_tensor(w, l, role, TINY_NONE, 0, 1, 0, 1, HEAD);
    if (norms & SUB_NORM)
        tiny_tensor(w, l, 7, TINY_NONE, 0, 1, 0, 1, HEADS * HEAD);
    tiny_tensor(w, l, 8, TINY_NONE, 0, l == 0 ? 4 : 5, 1, DIM, HEADS * HEAD);
    if (norms & POST_NORM)
        tiny_tensor(w, l, 9, TINY_NONE, 0, 1, 0, 1, DIM);
    if (norms & PRE_NORM)
        tiny_tensor(w, l, 10, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, l, 12, TINY_NONE, 0, 4, 1, FFN, DIM);
    tiny_tensor(w, l, 13, TINY_NONE, 0, l == 0 ? 5 : 7, 2, FFN, DIM);
    if (norms & SUB_NORM)
        tiny_tensor(w, l, 14, TINY_NONE, 0, 1, 0, 1, FFN);
    tiny_tensor(w, l, 15, TINY_NONE, 0, l == 0 ? 4 : 8, l == 0 ? 3 : 1, DIM, FFN);
    if (norms & POST_NORM)
        tiny_tensor(w, l, 16, TINY_NONE, 0, 1, 0, 1, DIM);
    const unsigned linears[] = {2, 3, 4, 8, 12, 13, 15};
    for (size_t i = 0; i < 7 && norms & LINEAR_NORM; i++)
        tiny_tensor(w, l, 32 + linears[i], TINY_NONE, 0, 1, 0, 1,
                    linears[i] == 8    ? HEADS * HEAD
                    : linears[i] == 15 ? FFN
                                       : DIM);
}

/* 2-bit encodings, scales per tensor and per row. */
static void tall_layer(tiny_writer *w, unsigned l) {
    const unsigned rows[] = {HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD, DIM};
    const unsigned roles[] = {2, 3, 4, 8};
    tiny_tensor(w, l, 1, TINY_NONE, 0, 1, 0, 1, DIM);
    for (size_t i = 0; i < 4; i++)
        tiny_tensor(w, l, roles[i], TINY_NONE, 0, 4, l == 0 ? 1 : 2, rows[i],
                    i < 3 ? DIM : HEADS * HEAD);
    tiny_tensor(w, l, 10, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, l, 12, TINY_NONE, 0, 4, 1, TALL_FFN, DIM);
    tiny_tensor(w, l, 13, TINY_NONE, 0, 4, 2, TALL_FFN, DIM);
    tiny_tensor(w, l, 15, TINY_NONE, 0, 4, 1, DIM, TALL_FFN);
}

/* global_every: 0, or one layer in this many has no window and another RoPE. */
static void decoder(tiny_writer *w, unsigned norms, uint32_t activation, uint32_t window,
                    uint32_t global_every, int tall) {
    const uint32_t one = tiny_float_bits(1), eps = tiny_float_bits(1e-5f);
    uint32_t words[48] = {0, 0, VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD, FFN, TOKENS, window};
    if (tall)
        words[2] = TALL_VOCAB, words[8] = TALL_FFN;
    words[12] = norms | TINY_FINAL_NORM;
    words[13] = eps;
    words[15] = activation;
    words[19] = words[22] = words[23] = one; /* scale factors */
    words[21] = words[28] = 1;               /* tied embedding, a head */
    words[24] = tiny_float_bits(0.22f);      /* attention scale */
    words[29] = HEAD;                        /* RoPE dimensions */
    words[30] = global_every;
    tiny_stack(w, words, "logits_hash");
    for (unsigned l = 0; l < LAYERS; l++)
        tall ? tall_layer(w, l) : layer(w, l, norms);
    if (tall)
        tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 4, 2, TALL_VOCAB, DIM);
    else if (norms & QK_NORM) /* a ternary embedding table, as in some Qwen3 models */
        tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 4, 3, VOCAB, DIM);
    else
        tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, VOCAB, DIM);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, DIM);
    for (unsigned role = 69; role <= (global_every ? 70u : 69u); role++)
        tiny_tensor(w, TINY_NONE, role, TINY_NONE, 0, 1, 0, 1, HEAD / 2);
}

/* Three tall experts, of which a token takes two, in every encoding. The first runs rows through
 * lookup tables, with a partial column and remaining rows. */
static void mixture_decoder(tiny_writer *w) {
    enum { EXPERTS = 3, TALL_TOKENS = 120 }; /* few, as they are slow on an emulated CPU */
    const uint32_t one = tiny_float_bits(1);
    const uint32_t words[48] = {[2] = VOCAB,
                                [3] = DIM,
                                [4] = 1,
                                [5] = HEADS,
                                [6] = KV_HEADS,
                                [7] = HEAD,
                                [8] = TALL_FFN,
                                [9] = TALL_TOKENS,
                                [12] = PRE_NORM | TINY_FINAL_NORM,
                                [13] = one,
                                [15] = SILU,
                                [16] = EXPERTS,
                                [17] = 2,
                                [19] = one,
                                [20] = 4,
                                [21] = 1,
                                [22] = one,
                                [23] = one,
                                [24] = tiny_float_bits(0.22f),
                                [28] = 1,
                                [29] = HEAD,
                                [31] = 1};
    const unsigned gate[] = {4, 4, 5}, up[] = {4, 7, 6}, down[] = {4, 8, 2};
    const unsigned scope[] = {[4] = 1, [5] = 1, [6] = 2, [7] = 1, [8] = 2};
    tiny_stack(w, words, "mixture");
    tiny_tensor(w, 0, 1, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, 0, 2, TINY_NONE, 0, 4, 1, HEADS * HEAD, DIM);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 4, 1, KV_HEADS * HEAD, DIM);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 4, 1, KV_HEADS * HEAD, DIM);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, DIM, HEADS * HEAD);
    tiny_tensor(w, 0, 10, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, 0, 11, TINY_NONE, 0, 2, 0, EXPERTS, DIM);
    for (unsigned e = 0; e < EXPERTS; e++)
        tiny_with_bias(w, 0, 12, e, gate[e], scope[gate[e]], TALL_FFN, DIM);
    for (unsigned e = 0; e < EXPERTS; e++)
        tiny_with_bias(w, 0, 13, e, up[e], scope[up[e]], TALL_FFN, DIM);
    for (unsigned e = 0; e < EXPERTS; e++)
        tiny_with_bias(w, 0, 15, e, down[e], scope[down[e]], DIM, TALL_FFN);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, VOCAB, DIM);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, HEAD / 2);
}

static void relu2_decoder(tiny_writer *w) {
    decoder(w, PRE_NORM | SUB_NORM, RELU2, 0, 0, 0);
}

static void silu_decoder(tiny_writer *w) {
    decoder(w, PRE_NORM | QK_NORM | POST_NORM, SILU, 11, 0, 0); /* the last rows do not see the
                                                                 * first chunk */
}

static void gelu_decoder(tiny_writer *w) {
    decoder(w, POST_NORM | LINEAR_NORM | QK_NORM, GELU, 7, 2, 0);
}

static void tall_decoder(tiny_writer *w) {
    decoder(w, PRE_NORM, RELU2, 0, 0, 1);
}

/* Set the mask of the first stack, which has layers with and without a window. */
static void set_mask(tiny_writer *w, bn_mask_kind mask) {
    decoder(w, PRE_NORM | SUB_NORM, RELU2, 40, 2, 0);
    tiny_put(w->stacks + 4, mask, 4);
}

static void bidirectional_encoder(tiny_writer *w) {
    set_mask(w, BN_MASK_BIDIRECTIONAL);
}

static void prefix_decoder(tiny_writer *w) {
    set_mask(w, BN_MASK_PREFIX);
}

/* Its images become the prefix of a text. */
static void seeing_decoder(tiny_writer *w) {
    set_mask(w, BN_MASK_PREFIX);
    tiny_put(w->stacks + 4 * 46, VOCAB - 1, 4); /* image token */
    tiny_vision(w, DIM);
}

static void check_ok(bn_status status, const char *what) {
    CHECK_MSG(status == BN_OK, "%s: %s", what, bn_status_text(status));
}

/* Ways to feed the tokens; each has one thread more than the previous one. */
static const struct {
    const char *name;
    size_t piece; /* 0: pieces of 1, 2, 3, ... tokens, repeated */
} ways[] = {{"1 thread, long pieces", LONGEST},
            {"2 threads, short pieces", 0},
            {"3 threads, each a third of the rows", 99}};

/* Tokens that see later ones come in one call: all, or two thirds. */
static size_t whole(const bn_model_info *info, size_t total) {
    return info->mask == BN_MASK_BIDIRECTIONAL ? total
           : info->mask == BN_MASK_PREFIX      ? total * 2 / 3
                                               : 0;
}

/* Feed the tokens in pieces and hash all logits. */
static uint32_t hash_session(const bn_model *model, bn_session *s, size_t piece) {
    bn_kernels scalar;
    bn_model_info info;
    bn_kernels_scalar(&scalar);
    check_ok(bn_model_get_info(model, &info), "info");
    const size_t total = (size_t)bn_session_context(s), vocab = info.vocab_size;
    uint32_t crc = 0;
    float *logits = malloc((total > LONGEST ? total : LONGEST) * vocab * sizeof *logits);
    int32_t *tokens = malloc((total > LONGEST ? total : LONGEST) * sizeof *tokens);
    CHECK(logits != NULL && tokens != NULL);
    for (size_t done = 0, step = 0, n; done < total; done += n, step++) {
        n = piece ? piece : step % 13 + 1;
        n = done == 0 && whole(&info, total) ? whole(&info, total) : n;
        n = n < total - done ? n : total - done;
        for (size_t i = 0; i < n; i++)
            tokens[i] = (int32_t)((done + i) * (done + i + 7919) % vocab);
        if (done == 0 && info.mask == BN_MASK_PREFIX)
            check_ok(bn_session_append_prefix(s, tokens, NULL, (int32_t)n, BN_LOGITS_ALL, logits),
                     "prefix");
        else
            check_ok(bn_session_append(s, tokens, (int32_t)n, BN_LOGITS_ALL, logits), "append");
        for (size_t i = 0; i < n * vocab; i++)
            CHECK_MSG(isfinite(logits[i]), "logit %zu after token %zu", i % vocab, done);
        crc = scalar.bytes.crc32(crc, (const uint8_t *)logits, n * vocab * sizeof *logits);
    }
    free(logits);
    free(tokens);
    return scalar.bytes.crc32(crc, (const uint8_t *)bn_session_digests(s),
                              total * sizeof(uint64_t));
}

/* Hash tokens sampled after the text, some with a draft that is sometimes right. */
static uint32_t hash_samples(bn_session *s, size_t vocab, size_t piece) {
    static const bn_sampler warm = {.temperature = 1.2f, .top_k = 60, .top_p = 0.98f};
    enum { SAMPLES = 9 };
    int32_t tokens[SAMPLES + 4] = {0}, n;
    bn_kernels scalar;
    bn_kernels_scalar(&scalar);
    check_ok(bn_session_rewind(s, bn_session_position(s) - SAMPLES - 1), "rewind");
    check_ok(bn_session_append(s, &(int32_t){7}, 1, BN_LOGITS_LAST, NULL), "append");
    for (int32_t done = 0; done < SAMPLES; done += n) {
        const int32_t left = SAMPLES - done, most = piece == LONGEST ? 0 : 3;
        const int32_t draft[] = {(int32_t)vocab / 2, 1, 2};
        check_ok(bn_session_step(s, &warm, draft, most, tokens + done, left, &n), "step");
    }
    return scalar.bytes.crc32(0, (const uint8_t *)tokens, SAMPLES * sizeof *tokens);
}

/* Hash the mean-pooled embedding of a text. */
static uint32_t hash_embedding(const bn_model_info *info, bn_session *s, size_t piece) {
    enum { TEXT = 50 };
    bn_kernels scalar;
    float out[DIM];
    int32_t tokens[TEXT];
    bn_kernels_scalar(&scalar);
    for (int i = 0; i < TEXT; i++)
        tokens[i] = i * i % VOCAB;
    check_ok(bn_session_rewind(s, 0), "rewind");
    piece = info->mask == BN_MASK_BIDIRECTIONAL ? TEXT : piece;
    for (size_t done = 0, n; done < TEXT; done += n) {
        n = piece && piece < TEXT - done ? piece : piece ? TEXT - done : 1 + done / 2;
        n = n < TEXT - done ? n : TEXT - done;
        check_ok(bn_session_embed(s, tokens + done, (int32_t)n, BN_POOL_MEAN, out), "embed");
    }
    return scalar.bytes.crc32(0, (const uint8_t *)out, sizeof out);
}

/* Hash images, few or many at a time, and the text after some of them. */
static uint32_t hash_images(const bn_model *model, bn_session *s, const bn_image_info *info,
                            size_t piece) {
    enum { IMAGES = 3, WORDS = 4 };
    const size_t pixels = info->channels * info->image_size * info->image_size;
    const size_t N = info->n_tokens, D = info->width, together = piece == LONGEST ? IMAGES : 1;
    float in[IMAGES * 128], states[IMAGES * 5 * DIM], vectors[IMAGES * DIM], logits[VOCAB];
    int32_t tokens[IMAGES * 5 + WORDS];
    bn_kernels scalar;
    bn_kernels_scalar(&scalar);
    CHECK(pixels == 128 && N == 5 && D == DIM);
    for (size_t i = 0; i < IMAGES * pixels; i++)
        in[i] = (float)(i * i % 257) / 256;
    for (size_t i = 0; i < IMAGES; i += together) {
        const int32_t n = (int32_t)together;
        check_ok(bn_image_encode(model, in + i * pixels, n, states + i * N * D, NULL), "encode");
        check_ok(bn_image_embed(model, in + i * pixels, n, vectors + i * D, NULL), "embed");
    }
    for (size_t i = 0; i < IMAGES * N + WORDS; i++)
        tokens[i] = i < IMAGES * N ? BN_NO_TOKEN : (int32_t)i;
    check_ok(bn_session_rewind(s, 0), "rewind");
    check_ok(bn_session_append_prefix(s, tokens, states, (int32_t)(IMAGES * N + WORDS),
                                      BN_LOGITS_LAST, logits),
             "prefix");
    uint32_t crc = scalar.bytes.crc32(0, (const uint8_t *)states, sizeof states);
    crc = scalar.bytes.crc32(crc, (const uint8_t *)vectors, sizeof vectors);
    return scalar.bytes.crc32(crc, (const uint8_t *)logits, sizeof logits);
}

static uint32_t hash_model(bn_model *model, bn_kv_type type, size_t piece) {
    bn_model_info info;
    bn_image_info images;
    bn_session *s;
    check_ok(bn_model_get_info(model, &info), "info");
    const int32_t n_ctx = info.max_context < TOKENS ? (int32_t)info.max_context : TOKENS;
    const bn_session_options options = {
        .n_ctx = n_ctx, .kv_type = (int32_t)type, .batch = piece == LONGEST ? 300 : 0};
    check_ok(bn_session_new(model, &options, &s), "session");
    uint32_t crc = hash_session(model, s, piece);
    if (info.mask == BN_MASK_CAUSAL)
        crc ^= hash_samples(s, info.vocab_size, piece);
    if (info.vocab_size == VOCAB && info.dim == DIM) /* not for a given FILE */
        crc ^= hash_embedding(&info, s, piece);
    if (bn_model_get_image_info(model, &images) == BN_OK && images.image_size == 8)
        crc ^= hash_images(model, s, &images, piece);
    bn_session_free(s);
    return crc;
}

/* Hash one model on all tiers in all ways or, with a `turn` from 0 on, on the best tier in one way;
 * returns the common hash. */
static uint32_t hash_all(const char *path, const uint8_t *bytes, size_t size, bn_kv_type type,
                         int32_t turn) {
    uint32_t first = 0;
    int known = 0;
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++)
        for (int32_t way = 0; way < 3; way++) {
            if (turn >= 0 && (i > 0 || way != turn % 3))
                continue;
            const bn_load_options options = {.threads = way + 1, .isa = bn_isa_name(i)};
            char why[BN_DETAIL_SIZE] = "";
            bn_model *model;
            const bn_status status = path ? bn_model_open(path, &options, &model, why)
                                          : bn_model_open_bytes(bytes, size, &options, &model, why);
            CHECK_MSG(status == BN_OK, "%s: %s", bn_status_text(status), why);
            const uint32_t crc = hash_model(model, type, ways[way].piece);
            bn_model_close(model);
            printf("%08" PRIx32 "  %-10s  %s\n", crc, bn_isa_name(i), ways[way].name);
            fflush(stdout);
            first = known ? first : crc;
            known = 1;
            CHECK_MSG(crc == first, "these logits are not those of the first line");
        }
    return first;
}

static const struct {
    void (*recipe)(tiny_writer *);
    bn_kv_type type;
} models[] = {
    {relu2_decoder, BN_KV_F16},   {silu_decoder, BN_KV_F32},    {relu2_decoder, BN_KV_INT8},
    {gelu_decoder, BN_KV_F16},    {silu_decoder, BN_KV_K4V8},   {prefix_decoder, BN_KV_K4V8},
    {tall_decoder, BN_KV_F16},    {tiny_original, BN_KV_F32},   {bidirectional_encoder, BN_KV_F16},
    {prefix_decoder, BN_KV_INT8}, {mixture_decoder, BN_KV_F16}, {seeing_decoder, BN_KV_F16}};
enum { MODELS = sizeof models / sizeof *models };

int main(int argc, char **argv) {
    uint32_t hashes[MODELS];
    const int brief = argc > 1 && strcmp(argv[1], "--brief") == 0;
    if (argc > 1 && !brief) {
        printf("logits %08" PRIx32 "\n", hash_all(argv[1], NULL, 0, BN_KV_F16, -1));
        return 0;
    }
    for (size_t i = 0; i < MODELS; i++) {
        size_t size;
        uint8_t *file = tiny_file(models[i].recipe, SIZE_MAX, SIZE_MAX, &size);
        hashes[i] = hash_all(NULL, file, size, models[i].type, brief ? (int32_t)i : -1);
        free(file);
    }
    printf("logits");
    for (size_t i = 0; i < MODELS; i++)
        printf(" %08" PRIx32, hashes[i]);
    printf("\n");
    return 0;
}
