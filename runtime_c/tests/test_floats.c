/* SPDX-License-Identifier: MIT
 *
 * test_floats.c: results do not depend on the floating-point environment of the caller's thread,
 * which is unchanged afterwards.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, mkstemp */

#include "session/session.h"

#include <fenv.h>
#include <unistd.h>

#include "session_model.h"
#include "together.h"

enum { TOKENS = 24, DRAWS = 6, ROUND = 4, ENVIRONMENTS = 2 * ROUND };

typedef struct results {
    float logits[TOKENS][VOCAB], last[VOCAB], scores[TOKENS], vector[DIM];
    int32_t tokens[4 * DRAWS];
} results;

/* Three wrong rounding modes and the right one; from the fifth on, subnormals are also flushed to
 * zero. */
static void enter(int environment) {
    const int roundings[ROUND] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    CHECK_EQ(fesetround(roundings[environment % ROUND]), 0);
#if defined(__x86_64__)
    bn_floats f = bn_floats_standard();
    f = environment >= ROUND ? f | 0x8040 : f & ~0x8040u;
    bn_floats_set(&f);
#elif defined(__aarch64__)
    bn_floats f = bn_floats_standard();
    f.control = environment >= ROUND ? f.control | 1 << 24 : f.control & ~(uint64_t)(1 << 24);
    bn_floats_set(&f);
#endif
}

static bn_floats now(void) {
    const bn_floats f = bn_floats_standard();
    bn_floats_set(&f);
    return f;
}

/* A call leaves the environment unchanged, exception flags included. */
#define UNCHANGED(call)                                                                            \
    do {                                                                                           \
        bn_floats before, after;                                                                   \
        memset(&before, 0, sizeof before), memset(&after, 0, sizeof after);                        \
        before = now();                                                                            \
        call;                                                                                      \
        after = now();                                                                             \
        CHECK(memcmp(&before, &after, sizeof before) == 0);                                        \
    } while (0)

static void compute(bn_model *model, results *r) {
    const bn_sampler sampler = {.temperature = 0.8f,
                                .top_k = 40,
                                .top_p = 0.95f,
                                .min_p = 0.01f,
                                .repeat_penalty = 1.1f,
                                .penalty_window = 8};
    int32_t prompt[TOKENS], *to = r->tokens, n;
    uint64_t random = 5;
    bn_session *s, *other;
    for (int i = 0; i < TOKENS; i++)
        prompt[i] = (int32_t)check_below(&random, VOCAB);
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_new(model, NULL, &other));
    UNCHANGED(ok(bn_session_append(s, prompt, TOKENS, BN_LOGITS_ALL, r->logits[0])));
    for (int i = 0; i < DRAWS; i++) {
        UNCHANGED(ok(bn_session_sample(s, &sampler, to)));
        UNCHANGED(ok(bn_session_append(s, to++, 1, BN_LOGITS_LAST, NULL)));
        UNCHANGED(ok(bn_session_step(s, &sampler, prompt, 2, to, 2, &n)));
        UNCHANGED(ok(append_together((bn_session *[]){s, other}, prompt, 2)));
        to += n;
    }
    UNCHANGED(CHECK(bn_session_logits(s) != NULL));
    memcpy(r->last, bn_session_logits(s), sizeof r->last);
    r->scores[0] = 0; /* NAN, as the session was empty */
    ok(bn_session_rewind(s, 0));
    UNCHANGED(ok(bn_session_score(s, prompt, 1, r->scores)));
    UNCHANGED(ok(bn_session_score(s, prompt + 1, TOKENS - 1, r->scores + 1)));
    ok(bn_session_rewind(s, 0));
    UNCHANGED(ok(bn_session_embed(s, prompt, TOKENS, BN_POOL_MEAN, r->vector)));
    bn_session_free(s);
    bn_session_free(other);
}

/* A model in which a subnormal number matters: embedding_scale. */
static void make_subnormal(uint8_t *file, size_t size) {
    bn_kernels kernels;
    bn_file f;
    bn_kernels_scalar(&kernels);
    CHECK_EQ(bn_file_parse(file, size, &kernels, &f, NULL), BN_OK);
    const bn_record r = f.tensors[f.n_tensors - 3];
    CHECK_EQ(r.role, BN_EMBEDDING);
    for (uint64_t i = 0; i < r.scale_size; i += 4)
        tiny_put(file + tiny_section(file, 6) + r.scale_offset + i, tiny_float_bits(1e30f), 4);
    bn_file_close(&f);
    tiny_put(file + tiny_section(file, 1) + 4 * 22, tiny_float_bits(1e-39f), 4);
    tiny_fix_checksums(file, size);
}

/* Calls that compute no text: measurements, and the opening of a file that is too large. */
static void test_other_calls(void) {
    char path[] = "/tmp/bitnet_floats_XXXXXX", why[BN_DETAIL_SIZE];
    const int fd = mkstemp(path);
    bn_model *model;
    double rate;
    CHECK(fd >= 0);
    CHECK_EQ(feclearexcept(FE_ALL_EXCEPT), 0);
    UNCHANGED(ok(bn_measure_read_bandwidth(1, 2 << 20, &rate)));
    UNCHANGED(ok(bn_measure_int8_peak(NULL, 1, &rate)));
    if (ftruncate(fd, (off_t)8 << 40) == 0) /* if the file system allows it */
        UNCHANGED(CHECK_EQ(bn_model_open(path, NULL, &model, why), BN_ERR_MEMORY));
    close(fd);
    unlink(path);
}

int main(void) {
    static results expected, found;
    test_other_calls();
    for (int subnormal = 0; subnormal < 2; subnormal++) {
        size_t size;
        uint8_t *file = tiny_file(large_vocabulary, SIZE_MAX, SIZE_MAX, &size);
        if (subnormal)
            make_subnormal(file, size);
        for (int32_t threads = 1; threads <= 3; threads += 2)
            for (int i = 0; i < 2 * ENVIRONMENTS; i++) {
                const bn_load_options options = {.threads = threads};
                bn_model *model;
                char why[BN_DETAIL_SIZE] = "";
                enter(i < ENVIRONMENTS ? 0 : i - ENVIRONMENTS); /* the environment that workers
                                                                 * would inherit */
                bn_status status;
                UNCHANGED(status = bn_model_open_bytes(file, size, &options, &model, why));
                CHECK_MSG(status == BN_OK, "%s", why);
                enter(i % ENVIRONMENTS);
                memset(&found, 0, sizeof found);
                compute(model, &found);
                enter(0);
                if (threads == 1 && i == 0)
                    expected = found;
                CHECK_MSG(memcmp(&found, &expected, sizeof found) == 0,
                          "%d threads, environment %d", threads, i);
                bn_model_close(model);
            }
        free(file);
    }
    return 0;
}
