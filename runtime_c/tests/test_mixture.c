/* SPDX-License-Identifier: MIT
 *
 * test_mixture.c: a mixture of experts gives the same bits however its rows are cut and dealt to
 * threads, applies the adapters of experts, and reports experts that overflow.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, mkstemp */

#include "mixture.h"
#include "session/session.h"
#include "session/turn.h"

#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "tiny_file.h"
#include "together.h"

enum { VOCAB = 19, EXPERTS = 3 };
enum { TEXT = 4096 }; /* the largest batch: not all of its rows have slots at once */

static int32_t text[TEXT];

static void long_mixture(tiny_writer *w) {
    tiny_mixture(w);
    tiny_put(w->stacks + 4 * 9, TEXT, 4); /* max_context */
}

/* Adapters for two of the three matrices of each expert, and for nothing else. */
static uint32_t rank;

static void adapted_mixture(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1);
    const uint32_t words[48] = {[2] = 19,   [3] = 24,   [4] = 1,
                                [5] = 2,    [6] = 1,    [7] = 8,
                                [8] = 20,   [9] = 32,   [12] = 256,
                                [13] = one, [16] = 3,   [17] = 2,
                                [19] = one, [20] = 0,   [21] = 1,
                                [22] = one, [23] = one, [24] = one,
                                [28] = 1,   [29] = 8,   [47] = rank | 96u << 16};
    tiny_stack(w, words, "adapted");
    tiny_tensor(w, 0, 2, TINY_NONE, 0, 4, 1, 16, 24);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 4, 1, 8, 24);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 4, 1, 8, 24);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, 24, 16);
    tiny_tensor(w, 0, 11, TINY_NONE, 0, 1, 0, 3, 24);
    for (unsigned role = 12; role < 16; role += role == 13 ? 2 : 1)
        for (unsigned e = 0; e < EXPERTS; e++) {
            const size_t rows = role == 15 ? 24 : 20, cols = role == 15 ? 20 : 24;
            tiny_tensor(w, 0, role, e, 0, 4, 1, rows, cols);
            if (role == 12)
                continue;
            tiny_tensor(w, 0, role, e, 2, 6, 2, rank, cols);
            tiny_tensor(w, 0, role, e, 3, 6, 2, rank, rows);
        }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 19, 24);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 24);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, 4);
}

/* Every matrix has a norm of its own. */
static void normed_mixture(tiny_writer *w) {
    enum { LINEAR_NORM = 8, ROUTER = 11 };
    const uint32_t one = tiny_float_bits(1);
    const uint32_t words[48] = {[2] = 19,   [3] = 24,   [4] = 1,
                                [5] = 2,    [6] = 1,    [7] = 8,
                                [8] = 20,   [9] = 32,   [12] = 256 | LINEAR_NORM,
                                [13] = one, [16] = 3,   [17] = 2,
                                [19] = one, [20] = 0,   [21] = 1,
                                [22] = one, [23] = one, [24] = one,
                                [28] = 1,   [29] = 8};
    const size_t cols[] = {
        [2] = 24, [3] = 24, [4] = 24, [8] = 16, [11] = 24, [12] = 24, [13] = 24, [15] = 20};
    const size_t rows[] = {
        [2] = 16, [3] = 8, [4] = 8, [8] = 24, [11] = 3, [12] = 20, [13] = 20, [15] = 24};
    tiny_stack(w, words, "normed");
    for (unsigned norms = 0; norms < 2; norms++)
        for (unsigned role = 2; role < 16; role++)
            for (unsigned e = 0; rows[role] > 0 && e < (role > 11 ? EXPERTS : 1); e++) {
                const unsigned expert = role > 11 ? e : TINY_NONE;
                if (norms && role != ROUTER)
                    tiny_tensor(w, 0, 32 + role, expert, 0, 1, 0, 1, cols[role]);
                else if (!norms)
                    tiny_tensor(w, 0, role, expert, 0, role == ROUTER ? 1 : 4, role != ROUTER,
                                rows[role], cols[role]);
            }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 19, 24);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 24);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, 4);
}

static void ok(bn_status status) {
    CHECK_MSG(status == BN_OK, "%s", bn_status_text(status));
}

static bn_model *opened(const uint8_t *file, size_t size, const bn_load_options *options) {
    char detail[BN_DETAIL_SIZE] = "";
    bn_model *m;
    const bn_status status = bn_model_open_bytes(file, size, options, &m, detail);
    CHECK_MSG(status == BN_OK, "%s", detail);
    return m;
}

/* Threads that run rows apart can take all rows of a step at once, with slots for each. */
static void test_shares(void) {
    enum { THREADS = 3, ODD = 100 };
    size_t size;
    uint8_t *file = tiny_file(long_mixture, SIZE_MAX, SIZE_MAX, &size);
    bn_model *m = opened(file, size, &(bn_load_options){.threads = THREADS});
    const bn_config *c = &m->stack.config;
    const int32_t batches[] = {ODD, TEXT};
    for (size_t i = 0; i < 2; i++) {
        bn_session *s;
        ok(bn_session_new(m, &(bn_session_options){.batch = batches[i]}, &s));
        const bn_workspace *w = bn_turn_begin(m);
        const size_t share = bn_workspace_share(w, THREADS);
        const bn_workspace last = bn_workspace_part(w, 0, THREADS - 1, THREADS);
        CHECK(w->batch == (size_t)batches[i] && THREADS * share >= w->slots.rows);
        CHECK(last.gate + share * c->ffn_dim <= w->up);
        CHECK(last.slots.gate + share * c->experts_per_token * c->ffn_dim <= w->slots.up);
        bn_turn_end(m);
        bn_session_free(s);
    }
    bn_model_close(m);
    free(file);
}

/* The logits after n tokens, appended `piece` at a time. */
static void logits_after(bn_model *m, int32_t n, int32_t piece, int32_t adapter, float *logits) {
    const bn_session_options options = {.batch = piece, .n_ctx = n, .adapter = adapter};
    bn_session *s;
    ok(bn_session_new(m, &options, &s));
    ok(bn_session_append(s, text, n, BN_LOGITS_LAST, NULL));
    CHECK(bn_session_logits(s) != NULL);
    memcpy(logits, bn_session_logits(s), VOCAB * sizeof *logits);
    bn_session_free(s);
}

static void test_cuts(void) {
    static const struct {
        int32_t threads, piece;
    } cuts[] = {{1, TEXT}, {2, TEXT}, {2, 200}, {1, 1}};
    enum { CUTS = sizeof cuts / sizeof *cuts };
    float logits[CUTS][VOCAB];
    size_t size;
    uint8_t *file = tiny_file(long_mixture, SIZE_MAX, SIZE_MAX, &size);
    for (int i = 0; i < CUTS; i++) {
        bn_model *m = opened(file, size, &(bn_load_options){.threads = cuts[i].threads});
        logits_after(m, TEXT, cuts[i].piece, 0, logits[i]);
        CHECK(memcmp(logits[i], logits[0], sizeof *logits) == 0);
        bn_model_close(m);
    }
    free(file);
}

static float (*exp_sum)(float *x, size_t n, float shift);

/* Of a router's outputs: holds a thread until another one routes a row, too. */
static float exp_sum_together(float *x, size_t n, float shift) {
    static _Thread_local int came;
    static atomic_int threads;
    if (n == EXPERTS && !came) {
        came = 1;
        threads++;
        while (threads < 2)
            sched_yield();
    }
    return exp_sum(x, n, shift);
}

/* Threads that route at the same time sort keys of their own. */
static void test_keys_of_threads(void) {
    size_t size;
    uint8_t *file = tiny_file(tiny_mixture, SIZE_MAX, SIZE_MAX, &size);
    bn_model *m = opened(file, size, &(bn_load_options){.threads = 2});
    bn_session *s;
    exp_sum = m->kernels.vectors.exp_sum;
    m->kernels.vectors.exp_sum = exp_sum_together;
    ok(bn_session_new(m, NULL, &s));
    const bn_workspace *w = bn_turn_begin(m);
    memset(w->slots.keys, 0xFF, 2 * EXPERTS * sizeof *w->slots.keys);
    bn_turn_end(m);
    ok(bn_session_append(s, text, 2, BN_LOGITS_NONE, NULL));
    for (int thread = 0; thread < 2; thread++)
        CHECK(w->slots.keys[thread * EXPERTS] != UINT64_MAX);
    bn_session_free(s);
    bn_model_close(m);
    free(file);
}

/* Gate and up, which have inputs of their own, are both multiplied. */
static void test_own_norms(void) {
    float logits[4][VOCAB], ones[20];
    size_t size;
    uint8_t *file = tiny_file(normed_mixture, SIZE_MAX, SIZE_MAX, &size);
    bn_model *m = opened(file, size, NULL);
    for (int i = 0; i < 20; i++)
        ones[i] = 1;
    logits_after(m, 9, 9, 0, logits[0]);
    logits_after(m, 9, 1, 0, logits[1]);
    for (int e = 0; e < EXPERTS; e++)
        m->stack.networks[e].gate.bias = ones;
    logits_after(m, 9, 9, 0, logits[2]);
    for (int e = 0; e < EXPERTS; e++)
        m->stack.networks[e].up.bias = ones;
    logits_after(m, 9, 9, 0, logits[3]);
    CHECK(memcmp(logits[0], logits[1], sizeof *logits) == 0);
    CHECK(memcmp(logits[0], logits[2], sizeof *logits) != 0);
    CHECK(memcmp(logits[2], logits[3], sizeof *logits) != 0);
    bn_model_close(m);
    free(file);
}

static void test_own_adapter(void) {
    float with[VOCAB], without[VOCAB];
    size_t size;
    uint8_t *file = tiny_file(adapted_mixture, SIZE_MAX, SIZE_MAX, &size);
    bn_model *m = opened(file, size, NULL);
    logits_after(m, 9, 9, 0, with);
    bn_low_rank *linears = m->stack.own.linears;
    m->stack.own.linears = NULL;
    logits_after(m, 9, 9, 0, without);
    m->stack.own.linears = linears;
    CHECK(memcmp(with, without, sizeof with) != 0);
    bn_model_close(m);
    free(file);
}

/* Of two texts in a pass, one has the adapter. Each has the logits that it has alone. */
static void test_adapter_of_a_text(void) {
    char path[] = "/tmp/bitnet_mixture_XXXXXX";
    const char *const adapters[] = {path};
    const bn_load_options options = {.threads = 2, .n_adapters = 1, .adapters = adapters};
    float logits[2][VOCAB];
    bn_session *s[2];
    size_t size, adapter_size;
    uint8_t *file = tiny_file(adapted_mixture, SIZE_MAX, SIZE_MAX, &size);
    uint8_t *adapter = tiny_adapter(adapted_mixture, file, 5, &adapter_size);
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, adapter, adapter_size) == (ssize_t)adapter_size && close(fd) == 0);
    bn_model *m = opened(file, size, &options);
    for (int i = 0; i < 2; i++)
        logits_after(m, 9, 9, i, logits[i]);
    CHECK(memcmp(logits[0], logits[1], sizeof *logits) != 0);
    for (int i = 0; i < 2; i++) {
        ok(bn_session_new(m, &(bn_session_options){.n_ctx = 9, .adapter = i}, &s[i]));
        ok(bn_session_append(s[i], text, 8, BN_LOGITS_NONE, NULL));
    }
    ok(append_together(s, (const int32_t[]){text[8], text[8]}, 2));
    for (int i = 0; i < 2; i++) {
        CHECK(memcmp(bn_session_logits(s[i]), logits[i], sizeof *logits) == 0);
        bn_session_free(s[i]);
    }
    bn_model_close(m);
    CHECK_EQ(unlink(path), 0);
    free(adapter);
    free(file);
}

static void test_overflow(void) {
    float huge[24];
    size_t size;
    uint8_t *file = tiny_file(tiny_mixture, SIZE_MAX, SIZE_MAX, &size);
    bn_model *m = opened(file, size, NULL);
    bn_session *s;
    for (int i = 0; i < 24; i++)
        huge[i] = 1e30f;
    for (int e = 0; e < EXPERTS; e++)
        m->stack.networks[e].gate.bias = m->stack.networks[e].up.bias = huge;
    ok(bn_session_new(m, NULL, &s));
    CHECK_EQ(bn_session_append(s, text, 1, BN_LOGITS_LAST, NULL), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_append(s, text, 5, BN_LOGITS_LAST, NULL), BN_ERR_NUMERIC);
    for (int e = 0; e < EXPERTS; e++) { /* in the last layer, after which nothing may see it */
        bn_network *before = &m->stack.networks[e], *last = before + EXPERTS;
        before->gate.bias = before->up.bias = NULL;
        last->gate.bias = last->up.bias = huge;
    }
    CHECK_EQ(bn_session_append(s, text, 5, BN_LOGITS_NONE, NULL), BN_ERR_NUMERIC);
    bn_session_free(s);
    bn_model_close(m);
    free(file);
}

int main(void) {
    uint64_t random = 7;
    for (int i = 0; i < TEXT; i++)
        text[i] = (int32_t)check_below(&random, VOCAB);
    test_cuts();
    test_shares();
    test_keys_of_threads();
    test_own_norms();
    for (rank = 1; rank <= 3; rank += 2) {
        test_own_adapter();
        test_adapter_of_a_text();
    }
    test_overflow();
    return 0;
}
