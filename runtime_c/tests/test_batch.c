/* SPDX-License-Identifier: MIT
 *
 * test_batch.c: batches: vectors in place of tokens, texts with different wants, and their shared
 * workspace, which a forked child may get in the middle of a turn.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "forward.h"
#include "session/batch.h"
#include "session/choose.h"
#include "session/guess.h"
#include "session/session.h"
#include "session/turn.h"

#include <sys/wait.h>
#include <unistd.h>

#include "session_model.h"

static bn_model *model;
static int32_t prompt[PROMPT];

static bn_session *new_session(const bn_session_options *options) {
    bn_session *s;
    ok(bn_session_new(model, options, &s));
    return s;
}

static void same(const float *a, const float *b, size_t n) {
    CHECK(a != NULL && b != NULL && memcmp(a, b, n * sizeof *a) == 0);
}

/* A row of the embedding table in place of its token gives the same bits, alone and among tokens;
 * another vector gives different ones. */
static void test_vectors(void) {
    enum { N = 21 };
    static float expected[N * VOCAB], logits[N * VOCAB], vectors[N][DIM];
    bn_session *tokens = new_session(NULL), *s = new_session(NULL);
    ok(bn_session_append(tokens, prompt, N, BN_LOGITS_ALL, expected));
    for (int every = 1; every <= 3; every++) {
        bn_batch b = bn_batch_begin(s);
        for (size_t i = 0; i < N; i++) {
            bn_row *row = bn_batch_add(&b, s, prompt[i], BN_WANT_LOGITS);
            row->out = logits + i * VOCAB;
            bn_embed(model, s->stack, prompt[i], vectors[i]);
            if (i % (size_t)every == 0)
                row->vector = vectors[i];
        }
        ok(bn_batch_run(&b));
        bn_batch_end(&b);
        same(logits, expected, sizeof logits / sizeof *logits);
        CHECK_EQ(bn_session_position(s), N);
        CHECK(memcmp(bn_session_tokens(s), prompt, N * sizeof *prompt) == 0);
        same(bn_session_logits(s), expected + (N - 1) * VOCAB, VOCAB);
        ok(bn_session_rewind(s, 0));
    }
    bn_batch b = bn_batch_begin(s);
    bn_row *row = bn_batch_add(&b, s, prompt[0], BN_WANT_LOGITS);
    vectors[0][DIM - 1] += 1;
    row->vector = vectors[0];
    row->out = logits;
    ok(bn_batch_run(&b));
    bn_batch_end(&b);
    CHECK(memcmp(logits, expected, VOCAB * sizeof *logits) != 0);
    bn_session_free(tokens);
    bn_session_free(s);
}

/* One batch: a token to sample after, a text to embed, a prompt, and a text with all logits
 * requested. Each must end as after a call of its own. */
static void test_different_wants(void) {
    enum { TEXT = 9, ALL = 5, N = 4 };
    static float expected[ALL * VOCAB], logits[ALL * VOCAB];
    float vector[DIM], embedded[DIM];
    bn_session *alone[N], *s[N];
    int32_t token, other, ready;
    for (int i = 0; i < N; i++) {
        alone[i] = new_session(NULL);
        s[i] = new_session(NULL);
    }
    ok(bn_session_append(alone[0], prompt, TEXT, BN_LOGITS_LAST, NULL));
    ok(bn_session_append(s[0], prompt, TEXT - 1, BN_LOGITS_NONE, NULL));
    ok(bn_session_embed(alone[1], prompt + 1, TEXT, BN_POOL_MEAN, embedded));
    ok(bn_session_embed(s[1], prompt + 1, 2, BN_POOL_MEAN, NULL));
    ok(bn_session_append(alone[2], prompt + 2, TEXT, BN_LOGITS_LAST, NULL));
    ok(bn_session_append(alone[3], prompt + 3, ALL, BN_LOGITS_ALL, expected));

    bn_batch b = bn_batch_begin(s[0]);
    bn_batch_add(&b, s[0], prompt[TEXT - 1], BN_WANT_SCORES);
    for (int i = 2; i < TEXT - 1; i++)
        bn_batch_add(&b, s[1], prompt[1 + i], BN_WANT_POOLED);
    for (int i = 0; i < TEXT; i++)
        bn_batch_add(&b, s[2], prompt[2 + i], i < TEXT - 1 ? BN_WANT_NOTHING : BN_WANT_HIDDEN);
    for (size_t i = 0; i < ALL; i++) /* in places that are not adjacent */
        bn_batch_add(&b, s[3], prompt[3 + i], BN_WANT_LOGITS)->out = logits + (ALL - 1 - i) * VOCAB;
    ok(bn_batch_run(&b));
    bn_batch_take(&b, 0);
    bn_prediction of = bn_prediction_of(s[0]);
    of.logits = bn_batch_scores(&b, 0, &ready);
    of.ready = &ready;
    CHECK_EQ(ready, BN_READY_ESTIMATES);
    ok(bn_choose(&of, b.w, NULL, &token, NULL));
    bn_batch_end(&b);
    s[1]->pooled = s[1]->position;

    CHECK_EQ(s[0]->ready, BN_READY_HIDDEN);
    ok(bn_session_sample(alone[0], NULL, &other));
    CHECK_EQ(token, other);
    ok(bn_session_sample(s[0], NULL, &token));
    CHECK_EQ(token, other);
    ok(bn_session_embed(s[1], prompt + TEXT, 1, BN_POOL_MEAN, vector));
    same(vector, embedded, DIM);
    for (size_t i = 0; i < ALL; i++)
        same(logits + (ALL - 1 - i) * VOCAB, expected + i * VOCAB, VOCAB);
    for (int i = 0; i < N; i++) {
        CHECK_EQ(s[i]->position, alone[i]->position);
        if (i != 1)
            same(bn_session_logits(s[i]), bn_session_logits(alone[i]), VOCAB);
        bn_session_free(s[i]);
        bn_session_free(alone[i]);
    }
}

/* The workspace exists from the first session to the last, and grows with their demands. */
static void test_workspace(void) {
    const bn_session_options small = {.n_ctx = 100, .batch = 2}, long_one = {.batch = 1},
                             large = {.n_ctx = 200, .batch = 150};
    bn_session_memory alone, again, more;
    CHECK(model->work == NULL);
    ok(bn_session_plan(model, &small, &alone));
    bn_session *a = new_session(&small);
    const bn_workspace *first = model->work;
    CHECK(first != NULL && first->batch == 2 && first->n_ctx == 100);
    CHECK_EQ(alone.needed, bn_session_bytes(a) + first->size);
    ok(bn_session_plan(model, &small, &again));
    CHECK_EQ(again.needed, bn_session_bytes(a));
    bn_session *b = new_session(&small);
    CHECK(model->work == first);
    bn_session *c = new_session(&long_one);
    CHECK(model->work->batch == 2 && model->work->n_ctx == CONTEXT);
    ok(bn_session_plan(model, &large, &more));
    ok(bn_session_append(a, prompt, 5, BN_LOGITS_LAST, NULL));
    bn_session *d = new_session(&large);
    CHECK(model->work->batch == 150 && model->work->n_ctx == CONTEXT);
    CHECK_EQ(more.needed, bn_session_bytes(d) + model->work->size);
    ok(bn_session_append(d, prompt, 5, BN_LOGITS_LAST, NULL));
    same(bn_session_logits(d), bn_session_logits(a), VOCAB);
    bn_session_free(d);
    bn_session_free(a);
    bn_session_free(c);
    CHECK(model->work != NULL && model->work->batch == 150);
    bn_session_free(b);
    CHECK(model->work == NULL);
}

/* With a large vocabulary a pass has room for the scores of few rows. */
static uint32_t n_words;

static void many_words(tiny_writer *w) {
    enum { D = 16 };
    const uint32_t one = tiny_float_bits(1);
    uint32_t words[48] = {0, 0, n_words, D, 1, 1, 1, D, D, 64};
    words[12] = 1 | TINY_FINAL_NORM;
    words[13] = tiny_float_bits(1e-5f);
    words[19] = words[22] = words[23] = words[24] = one;
    words[21] = words[28] = 1;
    words[29] = D;
    tiny_stack(w, words, "many_words");
    tiny_tensor(w, 0, 1, TINY_NONE, 0, 1, 0, 1, D);
    for (unsigned role = 2; role <= 15; role++)
        if (role <= 4 || role == 8 || role == 12 || role == 13 || role == 15)
            tiny_tensor(w, 0, role, TINY_NONE, 0, 4, 1, D, D);
        else if (role == 10)
            tiny_tensor(w, 0, role, TINY_NONE, 0, 1, 0, 1, D);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 4, 1, n_words, D);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, D);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, D / 2);
}

/* More texts than a pass takes, with more guesses than it has room for: each text as alone. */
static void test_more_than_a_pass(uint32_t vocabulary, int32_t batch) {
    enum { N = 3 * BN_GUESSERS, MOST = 3 };
    static int32_t expected[N][1 + MOST], chosen[N][MOST];
    static bn_entry entries[N];
    const bn_session_options options = {.batch = batch};
    const bn_sampler sampler = {.temperature = 1};
    size_t size;
    n_words = vocabulary;
    uint8_t *file = tiny_file(many_words, SIZE_MAX, SIZE_MAX, &size);
    bn_model *m;
    int32_t at_once = 0;
    ok(bn_model_open_bytes(file, size, &(bn_load_options){.threads = 2}, &m, NULL));
    for (int32_t i = 0; i < N; i++) {
        bn_session *s, *alone;
        ok(bn_session_new(m, &options, &s));
        bn_session_seed(s, (uint64_t)i);
        ok(bn_session_fork(s, &alone));
        expected[i][0] = i;
        for (int32_t t = 0; t < MOST; t++) {
            ok(bn_session_append(alone, &expected[i][t], 1, BN_LOGITS_LAST, NULL));
            CHECK(bn_session_logits(alone) != NULL);
            ok(bn_session_sample(alone, &sampler, &expected[i][t + 1]));
        }
        bn_session_free(alone);
        entries[i] = (bn_entry){.session = s,
                                .tokens = expected[i],
                                .n_tokens = 1,
                                .most = MOST,
                                .sampler = &sampler,
                                .draft = expected[i] + 1,
                                .n_draft = MOST - 1,
                                .chosen = chosen[i]};
    }
    ok(bn_step_batch(entries, N));
    for (int32_t i = 0; i < N; i++) {
        const int32_t n = entries[i].n_chosen;
        CHECK(n >= 1 && bn_session_position(entries[i].session) == n);
        CHECK(memcmp(chosen[i], expected[i] + 1, (size_t)n * sizeof **chosen) == 0);
        at_once += n > 1;
        bn_session_free(entries[i].session);
    }
    CHECK(at_once > 0); /* otherwise no guess had room */
    bn_model_close(m);
    free(file);
}

/* What two views have in common are strides and lengths, but no buffer: each pointer into the
 * workspace is shifted or NULL. */
static void check_apart(const bn_workspace *w, const bn_workspace *a, const bn_workspace *b) {
    const uintptr_t start = (uintptr_t)w, end = start + w->size;
    for (size_t at = 0; at < sizeof *w; at += sizeof start) {
        uintptr_t all, x, y;
        memcpy(&all, (const uint8_t *)w + at, sizeof all);
        memcpy(&x, (const uint8_t *)a + at, sizeof x);
        memcpy(&y, (const uint8_t *)b + at, sizeof y);
        if (at == offsetof(bn_workspace, buffers) || all < start || all >= end)
            continue;
        CHECK_MSG(x < y || (x == 0 && y == 0), "the pointer at byte %zu is shared", at);
    }
}

/* Threads that work alone share no buffer, whatever the workspace is made of. */
static void test_views(void) {
    enum { B = 64, TAKEN = 2 };
    const bn_stack stack = {.config = {.mask = BN_MASK_CAUSAL,
                                       .vocab_size = VOCAB,
                                       .dim = DIM,
                                       .n_heads = HEADS,
                                       .n_kv_heads = KV_HEADS,
                                       .head_dim = HEAD,
                                       .rope_dim = HEAD,
                                       .ffn_dim = FFN,
                                       .n_experts = 4,
                                       .experts_per_token = TAKEN},
                            .own.rank = 4,
                            .grouped = 1};
    bn_workspace *w = bn_workspace_new(model, &stack, B, CONTEXT);
    CHECK(w != NULL);
    const bn_workspace first = bn_workspace_part(w, 0, 0, 2);
    const bn_workspace next = bn_workspace_part(w, B / 2, 1, 2);
    const bn_workspace row = bn_workspace_alone(w, 0, 0), later = bn_workspace_alone(w, 1, 1);
    check_apart(w, &first, &next);
    check_apart(w, &row, &later);
    CHECK(next.slots.y == w->slots.y + (size_t)B / 2 * TAKEN * DIM);
    CHECK(next.batch == B / 2 && next.slots.rows == B / 2);
    free(w);
}

/* Scores take 4 MB, or as much as one row needs, and are for no more rows than a step has. */
static void test_score_rows(void) {
    static const struct {
        uint32_t vocabulary;
        size_t rows;
    } sizes[] = {{VOCAB, 100}, {20000, 52}, {1 << 20, 1}, {(1 << 20) + 1, 1}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        bn_stack stack = model->stack;
        stack.config.vocab_size = sizes[i].vocabulary;
        bn_workspace *w = bn_workspace_new(model, &stack, 100, CONTEXT);
        CHECK(w != NULL);
        CHECK_EQ(w->score_rows, sizes[i].rows);
        free(w);
    }
}

/* A child gets its parent's workspace in the middle of a turn. */
static void test_fork_in_a_turn(void) {
    bn_session *s = new_session(NULL), *t = new_session(NULL);
    int status;
    ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_LAST, NULL));
    CHECK(bn_session_logits(s) != NULL);
    bn_workspace *w = bn_turn_begin(model);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);
        memset(w->x, 0x55, w->batch * bn_row_stride(DIM) * sizeof *w->x);
        memset(w->in.q, 0x55, w->batch * w->in.q_stride);
        memset(w->partial, 0x55, DIM * sizeof *w->partial);
        w->chunks_done[0] = w->in.scratch.skipped[0] = w->in.scratch.skipped[1] = 1;
        ok(bn_session_append(t, prompt, PROMPT, BN_LOGITS_LAST, NULL));
        same(bn_session_logits(t), bn_session_logits(s), VOCAB);
        CHECK_EQ(bn_session_skipped(t), 0);
        _exit(0);
    }
    bn_turn_end(model);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_MSG(status == 0, "child ended with %#x", (unsigned)status);
    bn_session_free(s);
    bn_session_free(t);
}

int main(void) {
    size_t size;
    uint8_t *file = open_large_vocabulary(&model, prompt, &size);
    test_vectors();
    test_different_wants();
    test_workspace();
    test_views();
    test_score_rows();
    test_fork_in_a_turn();
    test_more_than_a_pass(50000, 0);
    test_more_than_a_pass(100, 0);
    test_more_than_a_pass(100, 5);
    bn_model_close(model);
    free(file);
    return 0;
}
