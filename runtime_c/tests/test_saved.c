/* SPDX-License-Identifier: MIT
 *
 * test_saved.c: a session that was saved and loaded continues as if nothing had happened.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, mkstemp */

#include <unistd.h>

#include "mask_model.h"

static uint8_t *saved(const bn_session *s, uint64_t *size) {
    static const char note[] = "a note";
    *size = bn_session_saved_size(s, sizeof note);
    uint8_t *bytes = malloc((size_t)*size);
    CHECK(bytes != NULL && *size > sizeof note);
    ok(bn_session_save(s, note, sizeof note, bytes, *size));
    CHECK_EQ(bn_session_save(s, note, sizeof note, bytes, *size - 1), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_save(s, NULL, sizeof note, bytes, *size), BN_ERR_ARGUMENT);
    return bytes;
}

static bn_session *loaded(const uint8_t *bytes, uint64_t size) {
    bn_session *s;
    const uint8_t *note;
    uint64_t note_size;
    char why[BN_DETAIL_SIZE];
    const bn_status status = bn_session_load(model, bytes, size, &s, &note, &note_size, why);
    CHECK_MSG(status == BN_OK, "%s: %s", bn_status_text(status), why);
    CHECK(note_size == 7 && memcmp(note, "a note", 7) == 0);
    return s;
}

static void same(bn_session *a, bn_session *b) {
    CHECK_EQ(bn_session_position(a), bn_session_position(b));
    CHECK_EQ(bn_session_context(a), bn_session_context(b));
    CHECK_EQ(bn_session_rewind_least(a), bn_session_rewind_least(b));
    CHECK(memcmp(bn_session_tokens(a), bn_session_tokens(b),
                 (size_t)bn_session_position(a) * sizeof(int32_t)) == 0);
    const float *x = bn_session_logits(a), *y = bn_session_logits(b);
    CHECK((x != NULL) == (y != NULL));
    CHECK(x == NULL || memcmp(x, y, VOCAB * sizeof *x) == 0);
}

/* Save and load; both sessions continue with sampled and with other tokens. */
static void goes_on(bn_session *s) {
    static const bn_sampler warm = {.temperature = 0.9f, .top_k = 50};
    uint64_t size, again;
    uint8_t *bytes = saved(s, &size);
    bn_session *other = loaded(bytes, size);
    uint8_t *second = saved(other, &again);
    CHECK(size == again && memcmp(bytes, second, (size_t)size) == 0);
    free(bytes); /* the bytes are not needed any more */
    free(second);
    same(s, other);
    for (int i = 0; i < 30 && bn_session_position(s) < bn_session_context(s); i++) {
        int32_t a = i, b = i;
        if (bn_session_logits(s)) {
            ok(bn_session_sample(s, &warm, &a));
            ok(bn_session_sample(other, &warm, &b));
        }
        CHECK_EQ(a, b);
        a %= VOCAB, b = a;
        ok(bn_session_append(s, &a, 1, BN_LOGITS_LAST, NULL));
        ok(bn_session_append(other, &b, 1, BN_LOGITS_LAST, NULL));
    }
    same(s, other);
    bn_session_free(other);
}

/* Every cache type; also without logits, without tokens, rewound, and full. */
static void test_going_on(void) {
    for (int32_t type = 0; type < BN_KV_TYPES; type++) {
        const bn_session_options options = {.kv_type = type, .n_ctx = 300};
        bn_session *s;
        ok(bn_session_new(model, &options, &s));
        bn_session_seed(s, 77);
        goes_on(s);
        ok(bn_session_append(s, text, 230, BN_LOGITS_LAST, NULL));
        goes_on(s);
        ok(bn_session_rewind(s, 131));
        goes_on(s);
        ok(bn_session_append(s, text, 300 - bn_session_position(s), BN_LOGITS_LAST, NULL));
        goes_on(s);
        bn_session_free(s);
    }
}

/* A prefix, and layers with a window that have forgotten. */
static void test_masks(uint32_t mask, uint32_t window, uint32_t global_every) {
    bn_session *s;
    begin(mask, window, global_every);
    const bn_session_options options = {.batch = 32};
    ok(bn_session_new(model, &options, &s));
    if (mask == BN_MASK_PREFIX)
        ok(bn_session_append_prefix(s, text, NULL, 40, BN_LOGITS_LAST, NULL));
    goes_on(s);
    ok(bn_session_append(s, text, 500, BN_LOGITS_LAST, NULL));
    goes_on(s);
    ok(bn_session_rewind(s, bn_session_position(s) - 10));
    goes_on(s);
    ok(bn_session_rewind(s, bn_session_rewind_least(s))); /* it needs all that was kept */
    goes_on(s);
    bn_session_free(s);
    end();
}

/* A text whose first append failed is still an empty one. */
static void test_failed(void) {
    float vector[DIM];
    for (int i = 0; i < DIM; i++)
        vector[i] = i % 2 ? 3e38f : -3e38f;
    bn_session *s = session(100, 0, BN_KV_F16);
    CHECK_EQ(bn_session_append_embeddings(s, vector, 1, BN_LOGITS_LAST, NULL), BN_ERR_NUMERIC);
    CHECK_EQ(bn_session_position(s), 0);
    goes_on(s);
    bn_session_free(s);
}

/* Of two adapters that differ only in their weights, a session finds its own, in any order, and the
 * first if a file is there twice; without it, it is refused. */
static void test_adapters(void) {
    char path[2][40] = {"/tmp/bitnet_saved_XXXXXX", "/tmp/bitnet_saved_XXXXXX"};
    const char *const orders[][3] = {{path[0], path[1], path[0]}, {path[1], path[0], path[1]}};
    bn_load_options options = {.threads = 2, .n_adapters = 3};
    uint8_t *bytes[2];
    uint64_t size;
    bn_session *s;
    begin(BN_MASK_CAUSAL, 0, 0);
    kind.rank = 3;
    for (uint64_t i = 0; i < 2; i++) {
        size_t bytes_of_adapter;
        uint8_t *adapter = tiny_adapter(recipe, file, i + 1, &bytes_of_adapter);
        const int fd = mkstemp(path[i]);
        CHECK(fd >= 0 && write(fd, adapter, bytes_of_adapter) == (ssize_t)bytes_of_adapter);
        CHECK_EQ(close(fd), 0);
        free(adapter);
    }
    for (int order = 0; order < 2; order++) {
        bn_model_close(model);
        options.adapters = orders[order];
        ok(bn_model_open_bytes(file, file_size, &options, &model, NULL));
        for (int i = 0; i < 2; i++) {
            if (order == 0) {
                ok(bn_session_new(model, &(bn_session_options){.adapter = i + 1}, &s));
                ok(bn_session_append(s, text, 9, BN_LOGITS_LAST, NULL));
                bytes[i] = saved(s, &size);
                bn_session_free(s);
            }
            s = loaded(bytes[i], size);
            CHECK_EQ(s->adapter, order ? 2 - i : i + 1);
            goes_on(s);
            bn_session_free(s);
        }
    }
    bn_model_close(model);
    options.n_adapters = 1; /* the second */
    ok(bn_model_open_bytes(file, file_size, &options, &model, NULL));
    CHECK_EQ(bn_session_load(model, bytes[0], size, &s, NULL, NULL, NULL), BN_ERR_MODEL);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(unlink(path[i]), 0);
        free(bytes[i]);
    }
    end();
}

static void test_arguments(void) {
    uint8_t byte = 0;
    bn_session *s = NULL;
    char why[BN_DETAIL_SIZE];
    CHECK_EQ(bn_session_saved_size(NULL, 0), 0);
    CHECK_EQ(bn_session_save(NULL, NULL, 0, &byte, 0), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_load(NULL, &byte, 1, &s, NULL, NULL, why), BN_ERR_ARGUMENT);
    CHECK_EQ(bn_session_load(model, NULL, 1, &s, NULL, NULL, NULL), BN_ERR_ARGUMENT);
    CHECK(s == NULL);
    s = session(8, 0, BN_KV_F16); /* an impossible note size: the saved size is 0, and no size is
                                   * accepted */
    CHECK_EQ(bn_session_saved_size(s, UINT64_MAX), 0);
    CHECK_EQ(bn_session_save(s, &byte, UINT64_MAX, &byte, 0), BN_ERR_ARGUMENT);
    uint64_t size;
    uint8_t *bytes = saved(s, &size);
    const uint8_t *note = NULL;
    bn_session_free(s);
    ok(bn_session_load(model, bytes, size, &s, &note, NULL, NULL)); /* only with both is it given */
    CHECK(note == NULL);
    bn_session_free(s);
    free(bytes);
}

int main(void) {
    test_masks(BN_MASK_CAUSAL, 100, 0);
    test_masks(BN_MASK_CAUSAL, 60, 2);
    test_masks(BN_MASK_PREFIX, 0, 0);
    test_adapters();
    begin(BN_MASK_CAUSAL, 0, 0);
    test_going_on();
    test_failed();
    test_arguments();
    end();
    return 0;
}
