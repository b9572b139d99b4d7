/* SPDX-License-Identifier: MIT
 *
 * test_ring.c: layers with a window keep only the window and what a pass writes. A session whose
 * batch is so large that everything fits never forgets; others must give the same bits.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "cache.h"

#include "mask_model.h"

_Static_assert(TEXT >= 600 && (TEXT + 4) % BN_LANES == 0 && LAYERS == 3, "sizes below count on it");

enum { WINDOW = 20, KEPT = 4096 /* a batch with room for everything */ };

static float right[TEXT * VOCAB], found[TEXT * VOCAB];

static size_t ring_of(const bn_session *s) {
    return s->cache.parts[1].slots;
}

/* Append tokens [first, end) in pieces of many sizes. */
static void feed(bn_session *s, int32_t first, int32_t end, float *out) {
    for (int32_t n, step = 0; first < end; first += n, step++) {
        n = 1 + step * 37 % 150;
        n = n < end - first ? n : end - first;
        ok(bn_session_append(s, text + first, n, BN_LOGITS_ALL, out + first * VOCAB));
    }
}

static void same(int32_t first, int32_t end_) {
    CHECK(memcmp(found + first * VOCAB, right + first * VOCAB,
                 (size_t)(end_ - first) * VOCAB * sizeof *right) == 0);
}

/* Compute the right answer, then open the model with the given options. */
static void begin_with(uint32_t window, uint32_t global_every, int32_t kv_type) {
    begin(BN_MASK_CAUSAL, window, global_every);
    bn_session *s = session(TEXT, KEPT, kv_type);
    CHECK(ring_of(s) >= TEXT);
    feed(s, 0, TEXT, right);
    bn_session_free(s);
}

static void test_bits(uint32_t window, uint32_t global_every, int32_t kv_type) {
    const int32_t batches[] = {1, 7, 100};
    begin_with(window, global_every, kv_type);
    bn_model_close(model);
    for (int32_t i = 0; bn_isa_name(i); i++) {
        open_model(bn_isa_name(i), 1 + i % 3);
        bn_session *s = session(TEXT, batches[i % 3], kv_type);
        const size_t least = window - 1 + (size_t)batches[i % 3];
        CHECK(ring_of(s) >= least && ring_of(s) < least + BN_CHUNK_KEYS);
        CHECK_EQ(ring_of(s) % BN_CHUNK_KEYS, 0);
        feed(s, 0, TEXT, found);
        same(0, TEXT);
        bn_session_free(s);
        bn_model_close(model);
    }
    open_model(NULL, 2);
    end();
}

/* Memory is what the sessions and the model report. */
static void test_bytes(void) {
    begin(BN_MASK_CAUSAL, WINDOW, 3);
    bn_model_info info;
    ok(bn_model_get_info(model, &info));
    CHECK_EQ(info.sliding_window, WINDOW);
    for (int32_t type = 0; type < BN_KV_TYPES; type++) {
        bn_session *all = session(TEXT, KEPT, type), *ring = session(TEXT, 100, type);
        const bn_session_options o = {.n_ctx = TEXT, .batch = 100, .kv_type = type};
        bn_session_memory memory;
        const uint64_t token = info.kv_window_bytes_per_token[type];
        CHECK_EQ(token, 2 * info.kv_bytes_per_token[type]); /* two of three layers */
        const size_t blocks = bn_cache_blocks(&all->cache) - bn_cache_blocks(&ring->cache);
        const uint64_t books =
            bn_session_bytes(all) - bn_session_bytes(ring) - token * (TEXT + 4 - 256);
        CHECK_EQ(blocks, (TEXT + 4 - 256) / BN_BLOCK_KEYS);
        CHECK(books >= 13 * blocks && books < 13 * blocks + 128); /* plus alignment */
        ok(bn_session_plan(model, &o, &memory));                  /* the workspace already exists */
        CHECK_EQ(memory.needed, bn_session_bytes(ring));
        bn_session_free(all);
        bn_session_free(ring);
    }
    end();
}

/* A text can be rewound as far as its ring has what the next token sees, and no further; so can
 * copies. */
static void test_rewind(int32_t kv_type) {
    const float huge[DIM] = {3e38f, 3e38f}; /* overflow when squared */
    begin_with(WINDOW, 2, kv_type);
    bn_session *s = session(TEXT, 50, kv_type), *copy;
    CHECK_EQ(ring_of(s), 256);
    feed(s, 0, 256, found);
    CHECK_EQ(bn_session_rewind_least(s), 0);
    feed(s, 256, 600, found);
    same(0, 600);
    const int32_t least = bn_session_rewind_least(s);
    CHECK_EQ(least, 600 - 256 + WINDOW - 1);
    CHECK_EQ(bn_session_rewind(s, least - 1), BN_ERR_STATE);
    CHECK_EQ(bn_session_rewind(s, 1), BN_ERR_STATE);
    CHECK_EQ(bn_session_position(s), 600);
    ok(bn_session_fork(s, &copy));
    ok(bn_session_rewind(s, least));
    ok(bn_session_rewind(copy, least + 30));
    CHECK_EQ(bn_session_rewind_least(copy), least); /* the rest is still there */
    CHECK_EQ(bn_session_append_embeddings(copy, huge, 1, BN_LOGITS_NONE, NULL), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_rewind_least(copy), least);
    feed(copy, least + 30, least + 31, found);
    CHECK_EQ(bn_session_rewind_least(copy), least);
    memset(found, 0, sizeof found);
    feed(s, least, TEXT, found);
    same(least, TEXT);
    feed(copy, least + 31, TEXT, found);
    same(least + 31, TEXT);
    ok(bn_session_rewind(s, 0));
    feed(s, 0, 300, found);
    same(0, 300);
    CHECK_EQ(bn_session_rewind_least(s), 300 - 256 + WINDOW - 1);
    bn_session_free(s);
    bn_session_free(copy);
    s = session(TEXT, 400, kv_type);
    feed(s, 0, 600, found);
    ok(bn_session_fork(s, &copy)); /* with a ring as large */
    CHECK(ring_of(s) == 512 && ring_of(copy) == 512);
    bn_session_free(s);
    feed(copy, 600, TEXT, found);
    same(600, TEXT);
    bn_session_free(copy);
    end();
}

/* Drafts of `longest` tokens write more than they keep. A pass takes no more of them than the ring
 * has room for, although other texts of the model may run more rows at a time. */
static void test_drafts(int32_t batch, int32_t longest) {
    enum { NEW = 300, AT = 400 };
    int32_t expected[NEW], tokens[NEW], n;
    uint64_t random = 1;
    begin_with(WINDOW, 3, BN_KV_F16);
    bn_session *all = session(TEXT, KEPT, BN_KV_F16), *ring = session(TEXT, batch, BN_KV_F16);
    ok(bn_session_append(all, text, AT, BN_LOGITS_LAST, NULL));
    ok(bn_session_append(ring, text, AT, BN_LOGITS_LAST, NULL));
    for (int i = 0; i < NEW; i++)
        ok(bn_session_step(all, NULL, NULL, 0, &expected[i], 1, &n));
    for (int i = 0; i < NEW; i += n) {
        int32_t draft[NEW], guesses = longest < NEW - i ? longest : NEW - i;
        memcpy(draft, expected + i, (size_t)guesses * sizeof *draft);
        draft[check_below(&random, (size_t)guesses)] ^= 1;
        ok(bn_session_step(ring, NULL, draft, guesses, tokens, guesses, &n));
        CHECK(n <= batch && memcmp(tokens, expected + i, (size_t)n * sizeof *tokens) == 0);
    }
    CHECK(memcmp(bn_session_logits(all), bn_session_logits(ring), VOCAB * sizeof(float)) == 0);
    bn_session_free(all);
    bn_session_free(ring);
    end();
}

/* Texts embedded together: none writes more at a time than its own ring has room for. */
static void test_together(void) {
    enum { N = 3 };
    const int32_t batches[N] = {400, 2, 60}, lengths[N] = {30, 600, 500};
    const int32_t *texts[N] = {text, text + 9, text + 20};
    float together[N][DIM], alone[DIM];
    bn_session *s[N];
    begin(BN_MASK_CAUSAL, WINDOW, 0);
    for (int i = 0; i < N; i++)
        s[i] = session(TEXT, batches[i], BN_KV_F16);
    ok(bn_embed_batch(s, texts, lengths, N, BN_POOL_MEAN, together[0]));
    for (int i = 0; i < N; i++) {
        bn_session *single = session(TEXT, KEPT, BN_KV_F16);
        ok(bn_session_embed(single, texts[i], lengths[i], BN_POOL_MEAN, alone));
        CHECK_MSG(memcmp(alone, together[i], sizeof alone) == 0, "text %d", i);
        bn_session_free(single);
        bn_session_free(s[i]);
    }
    end();
}

/* Check that the positions of a part before `end` that it still has are copies of the first
 * BN_REPEATED. */
static void check_repeated(const bn_session *s, size_t part, size_t end) {
    uint8_t first[4096], at[4096];
    const size_t row = s->cache.parts[part].row, slots = s->cache.parts[part].slots;
    CHECK(row > 0 && row <= sizeof at);
    for (size_t p = end > slots ? end - slots : 0; p < end; p++) {
        bn_cache_read(&s->cache, part, p % BN_REPEATED, first);
        bn_cache_read(&s->cache, part, p, at);
        CHECK_MSG(memcmp(first, at, row) == 0, "part %zu, position %zu", part, p);
    }
}

/* A text made longer by bn_session_repeat. */
static void test_repeat(int32_t kv_type) {
    enum { DEPTH = TEXT - 10 };
    begin(BN_MASK_CAUSAL, WINDOW, 3);
    bn_session *s = session(TEXT, 40, kv_type), *other;
    uint8_t kept[4096], now[4096];
    ok(bn_session_append(s, text, BN_REPEATED - 1, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_session_repeat(s, DEPTH), BN_ERR_STATE);
    ok(bn_session_append(s, text + BN_REPEATED - 1, 1, BN_LOGITS_LAST, NULL));
    ok(bn_session_repeat(s, BN_REPEATED + 1)); /* the shortest text that can be repeated */
    CHECK(!bn_session_logits(s));
    ok(bn_session_rewind(s, BN_REPEATED));
    ok(bn_session_append(s, text + BN_REPEATED, 29, BN_LOGITS_ALL, NULL));
    CHECK(bn_session_digests(s)[BN_REPEATED] != 0);
    CHECK_EQ(bn_session_repeat(s, BN_REPEATED - 1), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_repeat(s, TEXT + 1), BN_ERR_CONTEXT);
    CHECK_EQ(bn_session_position(s), BN_REPEATED + 29);
    ok(bn_session_fork(s, &other));
    bn_cache_read(&other->cache, 0, BN_REPEATED + 5, kept);
    ok(bn_session_repeat(s, DEPTH));
    CHECK_EQ(bn_session_position(s), DEPTH);
    CHECK(!bn_session_logits(s));
    for (int32_t i = 0; i < DEPTH; i++)
        CHECK_EQ(bn_session_tokens(s)[i], text[i % BN_REPEATED]);
    for (int32_t i = BN_REPEATED; i < DEPTH; i++) /* no state was computed */
        CHECK_EQ(bn_session_digests(s)[i], 0);
    check_repeated(s, 0, DEPTH);
    check_repeated(s, 1, DEPTH);
    bn_cache_read(&other->cache, 0, BN_REPEATED + 5, now);
    CHECK(memcmp(kept, now, s->cache.parts[0].row) == 0); /* the copy is unchanged */
    bn_session_free(other);
    ok(bn_session_fork(s, &other)); /* with all that is held now */
    ok(bn_session_append(s, text, TEXT - DEPTH, BN_LOGITS_LAST, NULL));
    ok(bn_session_append(other, text, TEXT - DEPTH, BN_LOGITS_LAST, NULL));
    CHECK(bn_session_logits(s) != NULL);
    CHECK(memcmp(bn_session_logits(s), bn_session_logits(other), VOCAB * sizeof(float)) == 0);
    CHECK_EQ(bn_session_repeat(s, DEPTH), BN_ERR_STATE); /* forgotten by the ring */
    bn_session_free(s);
    bn_session_free(other);
    end();
}

int main(void) {
    for (int32_t type = 0; type < BN_KV_TYPES; type++) {
        test_bits(WINDOW, 2, type);
        test_bits(300, 0, type);
        test_rewind(type);
        test_repeat(type);
    }
    test_bits(1, 0, BN_KV_F16);
    test_bytes();
    test_drafts(9, 9);
    test_drafts(257 - WINDOW, 300); /* the ring has 256 places */
    test_together();
    return 0;
}
