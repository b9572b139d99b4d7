/* SPDX-License-Identifier: MIT
 *
 * test_screen.c: which logits of the head are computed. None that can be chosen may be missing, and
 * those that are given must be exact.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "head.h"
#include "screen.h"
#include "session/logits.h"
#include "session/sampler.h"
#include "session/session.h"
#include "session/turn.h"

#include <math.h>

#include "session_model.h"

static bn_model *model;
static int32_t prompt[PROMPT];

static int falling(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* bn_head_wanted: the k largest, those not much smaller, and the requested tokens are present and
 * exact; most of the head is not computed. */
static void test_head_wanted(void) {
    static float full[VOCAB], sorted[VOCAB], top[VOCAB];
    static uint32_t listed[VOCAB];
    bn_session *s = prompted(model, NULL, prompt);
    bn_workspace *w = bn_turn_begin(model);
    uint64_t random = 3;
    for (size_t k = 1; k <= 190; k += 9) {
        const int32_t more[2] = {(int32_t)check_below(&random, VOCAB), VOCAB - 1};
        for (int d = 0; d < DIM; d++)
            w->x[d] = check_float(&random);
        ok(bn_head(model, &model->stack, w, 1, full));
        ok(bn_head_input(model, &model->stack, w, 1));
        bn_head_estimate(model, &model->stack, w, 1, VOCAB, top);
        memcpy(sorted, full, sizeof full);
        qsort(sorted, VOCAB, sizeof *sorted, falling);
        const float span = check_below(&random, 2) ? 0 : sorted[k - 1] - sorted[k + 9];
        const bn_wanted wanted = {.k = k, .span = span, .changed = more, .n = 2};
        const size_t n = bn_head_wanted(model, &model->stack, w, &wanted, top, listed);
        size_t at = 0;
        for (uint32_t v = 0; v < VOCAB; v++)
            if (at < n && listed[at] == v)
                CHECK(top[at++] == full[v]);
            else
                CHECK(full[v] < sorted[k - 1] - span && (int32_t)v != more[0] &&
                      (int32_t)v != more[1]);
        CHECK_EQ(at, n);
        const size_t out = VOCAB - n;
        CHECK_MSG(out > VOCAB / (k < 10 ? 2 : k < 100 ? 8 : 32), "%zu of %d ruled out", out, VOCAB);
    }
    bn_turn_end(model);
    bn_session_free(s);
}

/* If no token is ruled out, each is present once, and nothing is written past them. */
static void test_all_wanted(void) {
    static float full[VOCAB], all[VOCAB];
    static uint32_t listed[VOCAB + 1] = {[VOCAB] = 7};
    const bn_wanted wanted = {.k = 1, .span = INFINITY};
    bn_session *s = prompted(model, NULL, prompt);
    bn_workspace *w = bn_turn_begin(model);
    const bn_prediction of = bn_prediction_of(s);
    bn_load_hidden(&of, w);
    ok(bn_head(model, &model->stack, w, 1, full));
    bn_head_estimate(model, &model->stack, w, 1, VOCAB, all);
    CHECK_EQ(bn_head_wanted(model, &model->stack, w, &wanted, all, listed), VOCAB);
    for (uint32_t v = 0; v < VOCAB; v++)
        CHECK_EQ(listed[v], v);
    CHECK(memcmp(all, full, sizeof all) == 0 && listed[VOCAB] == 7);
    bn_turn_end(model);
    bn_session_free(s);
}

/* The token that arrives first among all is among the few that are computed. */
static void test_drawn_of_all(void) {
    static const float temperatures[] = {1, 10, 40, 80};
    static float full[VOCAB], drawn[VOCAB];
    static uint32_t listed[VOCAB];
    bn_session *s = prompted(model, NULL, prompt);
    bn_workspace *w = bn_turn_begin(model);
    uint64_t random = 5;
    size_t computed[4] = {0}, not_likeliest = 0;
    enum { DRAWS = 200 };
    for (uint64_t seed = 0; seed < DRAWS; seed++) {
        for (int d = 0; d < DIM; d++)
            w->x[d] = check_float(&random);
        ok(bn_head(model, &model->stack, w, 1, full));
        const bn_choices all = {.x = full, .n = VOCAB};
        int32_t token, likeliest;
        ok(bn_sample(NULL, &all, VOCAB, NULL, 0, 0, s->sampler_scratch, &model->kernels,
                     &likeliest));
        for (int i = 0; i < 4; i++) {
            const bn_sampler sampler = {.temperature = temperatures[i]};
            const bn_draw draw = {temperatures[i], seed, 0};
            const bn_wanted wanted = {.k = 1, .draw = &draw};
            ok(bn_sample(&sampler, &all, VOCAB, NULL, 0, seed, s->sampler_scratch, &model->kernels,
                         &token));
            ok(bn_head_input(model, &model->stack, w, 1));
            bn_head_estimate(model, &model->stack, w, 1, VOCAB, drawn);
            const size_t n = bn_head_wanted(model, &model->stack, w, &wanted, drawn, listed);
            int found = 0;
            for (size_t at = 0; at < n; at++) {
                CHECK(drawn[at] == full[listed[at]]);
                found |= ((int32_t)listed[at] == token) | ((int32_t)listed[at] == likeliest) << 1;
            }
            CHECK_EQ(found, 3);
            computed[i] += n;
            not_likeliest += token != likeliest;
        }
    }
    CHECK(not_likeliest > DRAWS); /* otherwise the draw had no effect */
    for (int i = 0; i < 4; i++)
        CHECK_MSG(computed[i] < DRAWS * VOCAB / 2, "%zu at temperature %g", computed[i] / DRAWS,
                  (double)temperatures[i]);
    bn_turn_end(model);
    bn_session_free(s);
}

/* --- heads with unusual sketches --- */

enum { WIDE = 512, FEW = 2000 };

static void wide(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1);
    uint32_t words[48] = {0, 0, FEW, WIDE, 1, 1, 1, HEAD, HEAD, CONTEXT};
    words[12] = 1 | TINY_FINAL_NORM;
    words[13] = tiny_float_bits(1e-5f);
    words[19] = words[22] = words[23] = one;
    words[21] = words[28] = 1;
    words[24] = tiny_float_bits(0.25f);
    words[29] = HEAD;
    tiny_stack(w, words, "wide");
    tiny_tensor(w, 0, 1, TINY_NONE, 0, 1, 0, 1, WIDE);
    for (unsigned role = 2; role < 5; role++)
        tiny_tensor(w, 0, role, TINY_NONE, 0, 4, 1, HEAD, WIDE);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, WIDE, HEAD);
    tiny_tensor(w, 0, 10, TINY_NONE, 0, 1, 0, 1, WIDE);
    for (unsigned role = 12; role < 14; role++)
        tiny_tensor(w, 0, role, TINY_NONE, 0, 4, 1, HEAD, WIDE);
    tiny_tensor(w, 0, 15, TINY_NONE, 0, 4, 1, WIDE, HEAD);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 9, 2, FEW, WIDE);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, WIDE);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, HEAD / 2);
}

/* The sketch of odd codes up to 3 is exact, so that an estimate differs from its logit by rounding
 * alone. In the other head, one column is clipped: if the largest activation meets it, estimates
 * are further off than noise would make them. */
static int8_t code(int clipped, size_t column, uint64_t *random) {
    if (!clipped)
        return (int8_t)(2 * (int)check_below(random, 4) - 3);
    return column == 0 ? (int8_t)(check_below(random, 2) ? 127 : -127)
                       : (int8_t)((int)check_below(random, 41) - 20);
}

/* The k largest are given. */
static void test_sketches(int clipped) {
    static float full[FEW], some[FEW];
    static uint32_t listed[FEW];
    size_t size;
    uint8_t *file = tiny_file(wide, SIZE_MAX, SIZE_MAX, &size);
    uint64_t random = 11;
    bn_model *m;
    bn_session *s;
    ok(bn_model_open_bytes(file, size, NULL, &m, NULL));
    int8_t *codes = (int8_t *)file + (m->stack.head.data - file);
    bn_model_close(m);
    for (size_t i = 0; i < (size_t)FEW * WIDE; i++)
        codes[i] = code(clipped, i % WIDE, &random);
    tiny_sketch((uint8_t *)codes, FEW, WIDE);
    tiny_fix_checksums(file, size);
    ok(bn_model_open_bytes(file, size, NULL, &m, NULL));
    ok(bn_session_new(m, NULL, &s));
    bn_workspace *w = bn_turn_begin(m);
    for (size_t k = 1; k < 20; k++) {
        const bn_wanted wanted = {.k = k};
        for (int d = 0; d < WIDE; d++)
            w->x[d] = check_float(&random);
        w->x[0] *= clipped ? 100 : 1;
        ok(bn_head(m, &m->stack, w, 1, full));
        ok(bn_head_input(m, &m->stack, w, 1));
        bn_head_estimate(m, &m->stack, w, 1, FEW, some);
        const size_t n = bn_head_wanted(m, &m->stack, w, &wanted, some, listed);
        qsort(memcpy(some, full, sizeof full), FEW, sizeof *some, falling);
        const float least = some[k - 1];
        size_t at = 0;
        for (uint32_t v = 0; v < FEW; v++)
            if (at < n && listed[at] == v)
                at++;
            else
                CHECK(full[v] < least);
    }
    bn_turn_end(m);
    bn_session_free(s);
    bn_model_close(m);
    free(file);
}

int main(void) {
    size_t size;
    uint8_t *file = open_large_vocabulary(&model, prompt, &size);
    test_head_wanted();
    test_all_wanted();
    test_drawn_of_all();
    test_sketches(0);
    test_sketches(1);
    bn_model_close(model);
    free(file);
    return 0;
}
