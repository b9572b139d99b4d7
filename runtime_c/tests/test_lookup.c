/* SPDX-License-Identifier: MIT
 *
 * test_lookup.c: products by lookup tables, whose last column of tokens may be partial: the bits of
 * single tokens, nothing written past the last token, scales of groups without tables, and tables
 * that hold no bytes of other allocations.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "model.h"
#include "session/session.h"
#include "session/turn.h"
#include "tiny_file.h"

enum { DIM = 40, HEAD = 8, FFN = 700, VOCAB = 31, CONTEXT = 64, TABLE_ROWS = 640 };

static unsigned scope; /* of the scales of gate and up, which are tall enough for tables */

static void recipe(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1);
    uint32_t words[48] = {0, 0, VOCAB, DIM, 1, 2, 1, HEAD, FFN, CONTEXT};
    words[12] = 1 | TINY_FINAL_NORM;
    words[13] = words[19] = words[22] = words[23] = words[24] = one;
    words[15] = words[21] = words[28] = 1; /* SiLU: no gate is 0 */
    words[29] = HEAD;
    tiny_stack(w, words, "tall");
    tiny_tensor(w, 0, 1, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, 0, 2, TINY_NONE, 0, 4, 1, 2 * HEAD, DIM);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 4, 1, HEAD, DIM);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 4, 1, HEAD, DIM);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, DIM, 2 * HEAD);
    tiny_tensor(w, 0, 10, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, 0, 12, TINY_NONE, 0, 4, scope, FFN, DIM);
    tiny_tensor(w, 0, 13, TINY_NONE, 0, 4, scope, FFN, DIM);
    tiny_tensor(w, 0, 15, TINY_NONE, 0, 4, 1, DIM, FFN);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, VOCAB, DIM);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, HEAD / 2);
}

static void ok(bn_status status) {
    CHECK_MSG(status == BN_OK, "%s", bn_status_text(status));
}

void *__real_aligned_alloc(size_t alignment, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);

/* The linker (--wrap, see CMakeLists.txt) inserts this before the C library's: memory that was used
 * before. */
void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    void *p = __real_aligned_alloc(alignment, size);
    return p ? memset(p, 0xA5, size) : NULL;
}

/* Entries of bytes that no weight has are never written, but a file that was not verified may read
 * them. */
static void check_cleared(bn_model *model) {
    bn_session *s;
    ok(bn_session_new(model, &(bn_session_options){.batch = CONTEXT}, &s));
    const bn_product_scratch *scratch = &bn_turn_begin(model)->in.scratch;
    CHECK(!model->kernels.products.lookup_tokens == !scratch->lookup);
    for (size_t i = 0; scratch->lookup && i < scratch->lookup_stride; i++)
        CHECK_MSG(scratch->lookup[i] == 0, "byte %zu", i);
    bn_turn_end(model);
    bn_session_free(s);
}

/* In a pass with room for more rows. */
static void check_rows(bn_model *model, int32_t n) {
    static float expected[CONTEXT][VOCAB], logits[CONTEXT][VOCAB];
    const size_t stride = bn_row_stride(FFN), past = (size_t)n * stride, end = CONTEXT * stride;
    int32_t text[CONTEXT];
    uint64_t random = 9;
    bn_session *s;
    ok(bn_session_new(model, &(bn_session_options){.batch = CONTEXT}, &s));
    for (int32_t i = 0; i < n; i++) {
        text[i] = (int32_t)check_below(&random, VOCAB);
        ok(bn_session_append(s, text + i, 1, BN_LOGITS_ALL, expected[i]));
    }
    ok(bn_session_rewind(s, 0));
    bn_workspace *w = bn_turn_begin(model);
    for (size_t i = past; i < end; i++)
        w->gate[i] = w->up[i] = 7;
    bn_turn_end(model);
    ok(bn_session_append(s, text, n, BN_LOGITS_ALL, logits[0]));
    CHECK(memcmp(logits, expected, (size_t)n * sizeof *logits) == 0);
    for (size_t i = past; i < end; i++)
        CHECK_MSG(w->gate[i] == 7 && w->up[i] == 7, "%d rows: row %zu is written", n, i / stride);
    bn_session_free(s);
}

int main(void) {
    for (scope = BN_SCALE_TENSOR; scope <= BN_SCALE_GROUP; scope++)
        for (int32_t tier = 0; bn_isa_name(tier); tier++) {
            const bn_load_options options = {.threads = 1, .isa = bn_isa_name(tier)};
            size_t size;
            uint8_t *file = tiny_file(recipe, SIZE_MAX, SIZE_MAX, &size);
            bn_model *model;
            ok(bn_model_open_bytes(file, size, &options, &model, NULL));
            model->kernels.products.lookup_rows = TABLE_ROWS; /* also where tables do not pay off */
            model->kernels.products.lookup_cols = 0;
            check_cleared(model);
            const int32_t tokens = (int32_t)model->kernels.products.lookup_tokens;
            for (int32_t n = 1; n < CONTEXT; n += n < tokens / 2 ? 5 : 1)
                check_rows(model, n);
            bn_model_close(model);
            free(file);
        }
    return 0;
}
