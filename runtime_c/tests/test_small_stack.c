/* SPDX-License-Identifier: MIT
 *
 * test_small_stack.c: a thread with the stack that the header names can make every kind of call.
 */
#define _GNU_SOURCE /* posix_memalign */

#include "session/session.h"

#include <pthread.h>

#include "session_model.h"

enum { STACK = 128 << 10 }; /* what bitnet_runtime.h promises */

/* A product by columns takes the most. */
static void with_columns(tiny_writer *w) {
    session_model(w, 8);
}

typedef struct caller {
    const uint8_t *file;
    size_t size;
    bn_load_options options;
} caller;

static void generate(bn_session *s, const int32_t *prompt) {
    const bn_sampler sampler = {.temperature = 1, .top_p = 0.9f};
    int32_t token, chosen[4], n;
    ok(bn_session_append(s, prompt, PROMPT, BN_LOGITS_LAST, NULL));
    ok(bn_session_sample(s, &sampler, &token));
    ok(bn_session_step(s, &sampler, NULL, 0, chosen, 4, &n));
    bn_entry entry = {.session = s, .tokens = &token, .n_tokens = 1, .most = 4, .chosen = chosen};
    ok(bn_step_batch(&entry, 1));
}

static void read_text(bn_session *s, const int32_t *prompt) {
    static float scores[PROMPT], vector[DIM];
    ok(bn_session_rewind(s, 0));
    ok(bn_session_score(s, prompt, PROMPT, scores));
    ok(bn_session_rewind(s, 0));
    ok(bn_session_embed(s, prompt, PROMPT, BN_POOL_MEAN, vector));
}

static void copy(bn_model *model, const bn_session *s) {
    bn_session *made;
    ok(bn_session_fork(s, &made));
    bn_session_free(made);
    const uint64_t size = bn_session_saved_size(s, 0);
    void *bytes = malloc((size_t)size);
    ok(bn_session_save(s, NULL, 0, bytes, size));
    ok(bn_session_load(model, bytes, size, &made, NULL, NULL, NULL));
    bn_session_free(made);
    free(bytes);
}

static void *call_everything(void *of) {
    const caller *c = of;
    static const int32_t prompt[PROMPT] = {1, 2, 3};
    bn_model *model;
    bn_session *s;
    ok(bn_model_open_bytes(c->file, c->size, &c->options, &model, NULL));
    for (int32_t type = 0; type < BN_KV_TYPES; type++) {
        ok(bn_session_new(model, &(bn_session_options){.kv_type = type}, &s));
        generate(s, prompt);
        read_text(s, prompt);
        copy(model, s);
        bn_session_free(s);
    }
    bn_model_close(model);
    return NULL;
}

int main(void) {
    size_t size;
    uint8_t *file = tiny_file(with_columns, SIZE_MAX, SIZE_MAX, &size);
    pthread_attr_t small;
    CHECK_EQ(pthread_attr_init(&small), 0);
    if (!SANITIZED) /* whose frames are larger */
        CHECK_EQ(pthread_attr_setstacksize(&small, STACK), 0);
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++) {
        caller c = {file, size, {.threads = 1, .isa = bn_isa_name(i)}};
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, &small, call_everything, &c), 0);
        CHECK_EQ(pthread_join(thread, NULL), 0);
    }
    pthread_attr_destroy(&small);
    free(file);
    return 0;
}
