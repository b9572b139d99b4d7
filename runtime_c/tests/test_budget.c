/* SPDX-License-Identifier: MIT
 *
 * test_budget.c: how much cache memory texts with shared blocks take, what happens when the budget
 * is exhausted, and sharing between threads.
 */
#define _GNU_SOURCE /* posix_memalign, mincore */

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cache.h"
#include "system/pages.h"

#include "mask_model.h"
#include "together.h"

static const bn_sampler warm = {.temperature = 1.2f, .top_k = 20};

/* Open a model, all of whose layers have the window, with a budget of n blocks of an f16 cache;
 * returns the bytes of one block. */
static uint64_t begin_with_window(uint32_t window, uint64_t n) {
    begin(BN_MASK_CAUSAL, window, 0);
    bn_model_info info;
    ok(bn_model_get_info(model, &info));
    bn_model_close(model);
    const uint64_t block = BN_BLOCK_KEYS * (window ? info.kv_window_bytes_per_token
                                                   : info.kv_bytes_per_token)[BN_KV_F16];
    const bn_load_options options = {.threads = 1, .cache_bytes = n * block};
    ok(bn_model_open_bytes(file, file_size, &options, &model, NULL));
    return block;
}

static uint64_t begin_with_blocks(uint64_t n) {
    return begin_with_window(0, n);
}

/* Each block takes its stated bytes; forks take none until they diverge. */
static void test_budget(void) {
    const uint64_t block = begin_with_blocks(5);
    bn_session *s, *copy, *other;
    int32_t token, n;
    ok(bn_session_new(model, NULL, &s));
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    ok(bn_session_append(s, text, 100, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_model_cache_bytes(model), 2 * block);
    ok(bn_session_fork(s, &copy));
    CHECK_EQ(bn_model_cache_bytes(model), 2 * block);
    ok(bn_session_append(copy, text, 1, BN_LOGITS_LAST, NULL)); /* copies half a block */
    CHECK_EQ(bn_model_cache_bytes(model), 3 * block);
    ok(bn_session_append(s, text, 28, BN_LOGITS_LAST, NULL)); /* the only one to reference it now */
    CHECK_EQ(bn_model_cache_bytes(model), 3 * block);
    ok(bn_session_new(model, NULL, &other));
    CHECK_EQ(bn_session_append(other, text, 129, BN_LOGITS_LAST, NULL), BN_ERR_CACHE);
    CHECK_EQ(bn_session_position(other), 0);
    CHECK_EQ(bn_model_cache_bytes(model), 3 * block); /* nothing was taken in part */
    ok(bn_session_append(other, text, 128, BN_LOGITS_LAST, NULL));
    bn_session *both[2] = {copy, s}; /* one has room in its block, the other has not */
    CHECK_EQ(append_together(both, text, 2), BN_ERR_CACHE);
    CHECK(bn_session_position(copy) == 102 && bn_session_position(s) == 128);
    token = n = -7;
    CHECK_EQ(bn_session_step(s, &warm, text, 5, &token, 5, &n), BN_ERR_CACHE);
    CHECK(token == -7 && n == -7); /* outputs of the failed call are unchanged */
    CHECK_EQ(bn_session_score(s, text, 1, &(float){0}), BN_ERR_CACHE);
    int32_t again;
    ok(bn_session_sample(s, &warm, &token)); /* its logits are still available */
    ok(bn_session_rewind(other, 0));
    CHECK_EQ(bn_model_cache_bytes(model), 3 * block);
    ok(bn_session_step(s, &warm, NULL, 0, &again, 1, &n));
    CHECK_EQ(again, token);
    bn_session_free(s); /* the copy keeps the first block and its arena */
    ok(bn_session_append(copy, text, 1, BN_LOGITS_LAST, NULL));
    bn_session_free(copy);
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    bn_session_free(other);
    end();
}

/* A block without references is available to others at once, whoever wrote it. */
static void test_given_back(void) {
    const uint64_t block = begin_with_blocks(4);
    bn_session *s, *copy, *other;
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_append(s, text, 200, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_model_cache_bytes(model), 4 * block);
    const bn_arena *own = s->cache.parts[0].own;
    ok(bn_session_rewind(s, 70));
    CHECK_EQ(bn_model_cache_bytes(model), 2 * block);
    ok(bn_session_new(model, NULL, &other));
    ok(bn_session_append(other, text, 100, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_session_append(s, text + 70, 100, BN_LOGITS_LAST, NULL), BN_ERR_CACHE);
    bn_session_free(other);
    ok(bn_session_append(s, text + 70, 100, BN_LOGITS_LAST, NULL));
    CHECK(s->cache.parts[0].own == own); /* its own places are free again */
    ok(bn_session_fork(s, &copy));
    ok(bn_session_rewind(s, 0)); /* the copy still references blocks of its arena */
    CHECK_EQ(bn_model_cache_bytes(model), 3 * block);
    ok(bn_session_rewind(copy, 64));
    CHECK_EQ(bn_model_cache_bytes(model), block);
    ok(bn_session_append(s, text, 170, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_model_cache_bytes(model), 4 * block);
    CHECK_EQ(bn_session_append(copy, text + 64, 1, BN_LOGITS_LAST, NULL), BN_ERR_CACHE);
    bn_session_free(s);
    ok(bn_session_append(copy, text + 64, 106, BN_LOGITS_LAST, NULL));
    ok(bn_session_new(model, NULL, &other));
    ok(bn_session_append(other, text, 1, BN_LOGITS_LAST, NULL));
    ok(bn_session_rewind(other, 0));
    bn_session_free(copy);
    ok(bn_session_append(other, text, 170, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_model_cache_bytes(model), 3 * block);
    bn_session_free(other);
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    end();
}

/* Pages returned to the system read as 0; bytes next to them are unchanged. */
static void test_dropped(void) {
    enum { SIZE = 6 << 20, FIRST = 1000003, DROPPED = 3 << 20, PAGE = 1 << 16 };
    for (int huge = 0; huge < 2; huge++) {
        uint8_t *bytes = bn_pages_grow(SIZE, huge);
        CHECK(bytes != NULL);
        for (size_t i = 0; i < SIZE; i++) {
            CHECK(bytes[i] == 0);
            bytes[i] = 7;
        }
        bn_pages_drop(bytes + FIRST, DROPPED);
        for (size_t i = 0; i < SIZE; i++)
            if (i < FIRST || i >= FIRST + DROPPED)
                CHECK(bytes[i] == 7);
            else if (i >= FIRST + PAGE && i < FIRST + DROPPED - PAGE) /* no page is larger */
                CHECK(bytes[i] == 0);
        bn_pages_drop(bytes + 100, 200); /* contains no whole page */
        CHECK(bytes[100] == 7);
        bn_pages_free(bytes, SIZE);
    }
}

#if defined(__linux__)
/* Memory is committed when it is written, also where a text was freed before: a page that is not
 * there is not in memory. */
static void test_committed_when_written(void) {
    enum { SIZE = 6 << 20, PAGES = SIZE >> 12 };
    static unsigned char there[PAGES + 1];
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (int round = 0; round < 4; round++) {
        uint8_t *bytes = bn_pages_grow(SIZE, 0);
        CHECK(bytes != NULL);
        uint8_t *first = bytes + (page - (uintptr_t)bytes % page) % page;
        const size_t n = ((size_t)(bytes + SIZE - first)) / page;
        CHECK_EQ(mincore(first, n * page, there), 0);
        for (size_t i = 1; i < n; i++)
            CHECK_MSG(!(there[i] & 1), "round %d: page %zu of %zu", round, i, n);
        memset(bytes, 7, SIZE);
        bn_pages_free(bytes, SIZE);
    }
}

/* With a budget, the pages of blocks that are given back are no longer in memory, except those at
 * the ends of a block. */
static void test_not_kept(void) {
    enum { BLOCKS = 4, PAGES = 256 };
    unsigned char there[PAGES];
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    size_t kept = 0;
    begin_with_blocks(2 * BLOCKS);
    bn_session *s = session(TEXT, 0, BN_KV_F32);
    ok(bn_session_append(s, text, BLOCKS * BN_BLOCK_KEYS, BN_LOGITS_LAST, NULL));
    const bn_arena *arena = s->cache.parts[0].own;
    uint8_t *first = arena->memory - (uintptr_t)arena->memory % page;
    const size_t n = (size_t)(arena->memory - first) / page + BLOCKS * arena->block / page;
    ok(bn_session_rewind(s, 0));
    CHECK(n <= PAGES && mincore(first, n * page, there) == 0);
    for (size_t i = 0; i < n; i++)
        kept += there[i] & 1;
    CHECK_MSG(kept <= BLOCKS + 1, "%zu of %zu pages", kept, n);
    bn_session_free(s);
    end();
}
#endif

/* Reserved memory is available when needed, and is released when not. */
static void test_reserved(void) {
    const uint64_t block = begin_with_blocks(3);
    bn_session *s, *other;
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_new(model, NULL, &other));
    CHECK_EQ(bn_session_reserve(NULL, 1), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_reserve(s, -1), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_reserve(s, bn_session_context(s) + 1), BN_ERR_CONTEXT);
    CHECK_EQ(bn_session_reserve(s, 3 * BN_BLOCK_KEYS + 1), BN_ERR_CACHE);
    ok(bn_session_reserve(s, 0));
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    ok(bn_session_append(s, text, 10, BN_LOGITS_LAST, NULL));
    ok(bn_session_reserve(s, 119)); /* 129 in all */
    CHECK(bn_session_position(s) == 10 && bn_session_logits(s) != NULL);
    CHECK_EQ(bn_model_cache_bytes(model), 3 * block);
    CHECK_EQ(bn_session_append(other, text, 1, BN_LOGITS_LAST, NULL), BN_ERR_CACHE);
    ok(bn_session_append(s, text, 119, BN_LOGITS_LAST, NULL));
    ok(bn_session_rewind(s, 0));
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    ok(bn_session_append(other, text, 1, BN_LOGITS_LAST, NULL));
    bn_session_free(s);
    bn_session_free(other);
    end();
}

/* A text may be longer than the ring of a window, which it takes only once. */
static void test_ring(void) {
    const uint64_t block = begin_with_window(20, 4);
    bn_session *s = session(TEXT, 100, BN_KV_F16);
    ok(bn_session_append(s, text, TEXT - 300, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_model_cache_bytes(model), 4 * block);
    ok(bn_session_append(s, text, 300, BN_LOGITS_LAST, NULL));
    bn_session_free(s);
    end();
}

/* If texts do not fit together, none takes memory. */
static void test_embedded_together(void) {
    const uint64_t block = begin_with_blocks(3);
    bn_session *s[3];
    const int32_t *const texts[] = {text, text, text};
    const int32_t lengths[] = {10, 60, 128};
    for (int i = 0; i < 3; i++)
        ok(bn_session_new(model, NULL, &s[i]));
    ok(bn_session_embed(s[0], text, 50, BN_POOL_MEAN, NULL));
    CHECK_EQ(bn_embed_batch(s, texts, lengths, 3, BN_POOL_MEAN, NULL), BN_ERR_CACHE);
    CHECK_EQ(bn_model_cache_bytes(model), block); /* what it had before */
    CHECK_EQ(bn_session_position(s[0]), 50);
    ok(bn_embed_batch(s + 1, texts, lengths + 2, 1, BN_POOL_MEAN, NULL));
    float score = 5;
    CHECK_EQ(bn_session_score(s[2], text, 1, &score), BN_ERR_CACHE);
    CHECK(score == 5.0f);
    for (int i = 0; i < 3; i++)
        bn_session_free(s[i]);
    end();
}

/* A draft without room is left out; the text is the same. */
static void test_draft_without_room(void) {
    begin_with_blocks(1);
    int32_t draft[4], tokens[4], n;
    bn_session *s;
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_append(s, text, 62, BN_LOGITS_LAST, NULL));
    for (int i = 0; i < 2; i++)
        ok(bn_session_step(s, &warm, NULL, 0, &draft[i], 1, &n));
    draft[2] = draft[3] = 0;
    ok(bn_session_rewind(s, 61));
    ok(bn_session_append(s, text + 61, 1, BN_LOGITS_LAST, NULL));
    ok(bn_session_step(s, &warm, draft, 4, tokens, 4, &n));
    CHECK(n == 1 && tokens[0] == draft[0]);
    bn_session_free(s);
    end();
}

/* Forks of one text in two threads. */
static void *forks(void *context) {
    bn_session *s = context;
    for (int32_t round = 0; round < 30; round++) {
        bn_session *copy;
        int32_t tokens[3], n;
        ok(bn_session_fork(s, &copy));
        for (int i = 0; i < 3; i++) {
            ok(bn_session_step(copy, &warm, NULL, 0, &tokens[i], 1, &n));
            ok(bn_session_step(s, &warm, NULL, 0, &n, 1, &(int32_t){0}));
            CHECK_EQ(n, tokens[i]);
        }
        CHECK(memcmp(bn_session_logits(copy), bn_session_logits(s), VOCAB * sizeof(float)) == 0);
        bn_session_free(round % 2 ? copy : s);
        s = round % 2 ? s : copy;
    }
    bn_session_free(s);
    return NULL;
}

static void test_threads(void) {
    begin(BN_MASK_CAUSAL, 20, 2);
    bn_session *s[3];
    pthread_t thread;
    ok(bn_session_new(model, NULL, &s[0]));
    ok(bn_session_append(s[0], text, 330, BN_LOGITS_LAST, NULL));
    for (int i = 1; i < 3; i++) {
        ok(bn_session_fork(s[0], &s[i]));
        bn_session_seed(s[i], (uint64_t)i);
    }
    CHECK(pthread_create(&thread, NULL, forks, s[1]) == 0);
    forks(s[2]);
    CHECK(pthread_join(thread, NULL) == 0);
    bn_session_free(s[0]);
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    end();
}

/* --- two threads --- */

enum { ROUNDS = 2000, PARTED = 200 /* positions, in a ring of 256 */ };

static atomic_int arrived;

/* Barrier: both threads continue together from here. */
static void meet(int round) {
    atomic_fetch_add(&arrived, 1);
    while (atomic_load(&arrived) < 2 * (round + 1))
        sched_yield();
}

static bn_session *parting[ROUNDS][2];

static void *part(void *context) {
    const int which = *(const int *)context;
    for (int round = 0; round < ROUNDS; round++) {
        meet(round);
        ok(bn_session_reserve(parting[round][which], PARTED));
        bn_session_free(parting[round][which]);
    }
    return NULL;
}

/* Two texts diverge from the same blocks at the same moment: bytes that each charged before the
 * other released the block, but then did not need to copy, are given back. */
static void test_parting_at_once(void) {
    begin(BN_MASK_CAUSAL, 20, 0);
    static const int which[] = {0, 1};
    bn_session *s = session(600, 200, BN_KV_F16);
    pthread_t thread;
    ok(bn_session_append(s, text, 400, BN_LOGITS_NONE, NULL));
    for (int round = 0; round < ROUNDS; round++) {
        bn_session *copy;
        ok(bn_session_fork(s, &copy));
        ok(bn_session_reserve(copy, PARTED)); /* blocks that only the next two share */
        for (int i = 0; i < 2; i++)
            ok(bn_session_fork(copy, &parting[round][i]));
        bn_session_free(copy);
    }
    bn_session_free(s);
    CHECK(pthread_create(&thread, NULL, part, (void *)(uintptr_t)&which[0]) == 0);
    part((void *)(uintptr_t)&which[1]);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    end();
}

static void *ask_too_much(void *context) {
    bn_budget *budget = context;
    while (!atomic_load(&arrived))
        CHECK(!bn_budget_take(budget, 1000));
    return NULL;
}

/* A request that fits is granted, whatever others are refused at the same time. */
static void test_refused_at_once(void) {
    bn_budget budget = {.most = 100};
    pthread_t thread;
    atomic_store(&arrived, 0);
    CHECK(pthread_create(&thread, NULL, ask_too_much, &budget) == 0);
    for (int i = 0; i < 1000000; i++) {
        CHECK(bn_budget_take(&budget, 60));
        CHECK(atomic_load(&budget.used) == 60);
        bn_budget_give(&budget, 60);
    }
    atomic_store(&arrived, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(!bn_budget_take(&(bn_budget){.most = 100, .used = 60}, SIZE_MAX - 30)); /* no overflow */
}

int main(void) {
    test_budget();
    test_given_back();
    test_dropped();
#if defined(__linux__)
    test_committed_when_written();
    test_not_kept();
#endif
    test_ring();
    test_reserved();
    test_embedded_together();
    test_draft_without_room();
    test_threads();
    test_parting_at_once();
    test_refused_at_once();
    return 0;
}
