/* SPDX-License-Identifier: MIT
 *
 * test_entering.c: a vector in place of a token enters unchanged, except for what all rows get:
 * their position and the embedding norm.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "forward.h"
#include "session/batch.h"
#include "session/session.h"
#include "tiny_file.h"

enum { DIM = 24, VOCAB = 19, TOKENS = 9 };

static void ok(bn_status status) {
    CHECK_MSG(status == BN_OK, "%s", bn_status_text(status));
}

static void test(const bn_load_options *options) {
    size_t size;
    uint8_t *file = tiny_file(tiny_original, SIZE_MAX, SIZE_MAX, &size);
    const int32_t tokens[TOKENS] = {3, 1, 4, 1, 5, 9, 2, 6, 18};
    float vectors[TOKENS][DIM], expected[TOKENS][VOCAB], found[TOKENS][VOCAB];
    bn_model *model;
    bn_session *s;
    ok(bn_model_open_bytes(file, size, options, &model, NULL));
    ok(bn_session_new(model, NULL, &s));
    ok(bn_session_append(s, tokens, TOKENS, BN_LOGITS_ALL, expected[0]));
    ok(bn_session_rewind(s, 0));
    bn_batch b = bn_batch_begin(s);
    for (int i = 0; i < TOKENS; i++) {
        bn_embed(model, &model->stack, tokens[i], vectors[i]);
        bn_row *row = bn_batch_add(&b, s, 0, BN_WANT_LOGITS);
        row->out = found[i];
        if (i % 3 > 0)
            row->vector = vectors[i]; /* already multiplied by embedding_scale */
        else
            row->token = tokens[i];
    }
    ok(bn_batch_run(&b));
    bn_batch_end(&b);
    CHECK(memcmp(found, expected, sizeof found) == 0);
    bn_session_free(s);
    bn_model_close(model);
    free(file);
}

int main(void) {
    for (int32_t i = 0; bn_isa_name(i) != NULL; i++)
        test(&(bn_load_options){.threads = 1 + i % 2, .isa = bn_isa_name(i)});
    return 0;
}
