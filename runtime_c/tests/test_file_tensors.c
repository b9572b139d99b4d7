/* SPDX-License-Identifier: MIT
 *
 * test_file_tensors.c: which encoding and scope of scales a tensor may have, by its role
 * (export/FORMAT.md §3), and how long a row of TERNARY_5TRIT may be.
 */
#define _POSIX_C_SOURCE 200809L
#include "file_check.h"

enum { DIM = 8, VOCAB = 9, BIAS = 1000 /* + role: the bias of this role */ };

/* Parameters of the recipe below; recipes take no arguments. */
static unsigned role, encoding, scope, ffn_dim = 5;

/* A tensor that represents its kind is written as requested, the others as usual. */
static void tensor(tiny_writer *w, unsigned layer, unsigned r, unsigned usual_encoding,
                   unsigned usual_scope, size_t rows, size_t cols) {
    const int asked = r == role;
    tiny_tensor(w, layer, r, TINY_NONE, 0, asked ? encoding : usual_encoding,
                asked ? scope : usual_scope, rows, cols);
}

static void bias(tiny_writer *w, unsigned r, size_t outputs) {
    const int asked = BIAS + r == role;
    tiny_tensor(w, 0, r, TINY_NONE, 1, asked ? encoding : 1, asked ? scope : 0, 1, outputs);
}

static void recipe(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[2] = VOCAB,   [3] = DIM,  [4] = 1,
                                [5] = 1,       [6] = 1,    [7] = 3,
                                [8] = ffn_dim, [9] = 7,    [12] = TINY_FINAL_NORM,
                                [13] = one,    [14] = 1,   [18] = 1,
                                [19] = one,    [20] = 4,   [22] = one,
                                [23] = one,    [24] = one, [28] = 1};
    tiny_stack(w, words, "one of each kind");
    tensor(w, 0, BN_Q, 4, 1, 3, DIM);
    tensor(w, 0, BN_K, 4, 1, 3, DIM);
    tensor(w, 0, BN_V, 4, 1, 3, DIM);
    tensor(w, 0, BN_O, 4, 1, DIM, 3);
    tensor(w, 0, BN_UP, 4, 1, ffn_dim, DIM);
    bias(w, BN_UP, ffn_dim);
    tensor(w, 0, BN_DOWN, 4, 1, DIM, ffn_dim);
    bias(w, BN_DOWN, DIM);
    tensor(w, TINY_NONE, BN_EMBEDDING, 6, 2, VOCAB, DIM);
    tensor(w, TINY_NONE, BN_POSITION, 1, 0, 7, DIM);
    tensor(w, TINY_NONE, BN_FINAL_NORM, 1, 0, 1, DIM);
    tensor(w, TINY_NONE, BN_HEAD, 6, 2, VOCAB, DIM);
}

static bn_status status_of(unsigned r, unsigned e, unsigned s) {
    size_t size;
    char detail[BN_DETAIL_SIZE] = "";
    role = r, encoding = e, scope = s;
    uint8_t *bytes = tiny_file(recipe, SIZE_MAX, SIZE_MAX, &size);
    const bn_status status = file_status(bytes, size, detail);
    CHECK_MSG(status == BN_OK || strstr(detail, "is not allowed here") != NULL, "%s", detail);
    free(bytes);
    return status;
}

static void test_formats(void) {
    static const struct {
        unsigned role;
        const char *allowed; /* pairs of encoding and scope */
    } rows[] = {{BN_Q, "10 20 41 42 43 51 52 62"},
                {BN_UP, "10 20 41 42 43 51 52 62 71 72"},
                {BN_DOWN, "10 20 41 42 43 51 52 62 81 82"},
                {BN_EMBEDDING, "10 20 41 42 43 62 92"},
                {BN_HEAD, "10 20 41 42 43 62 92"},
                {BIAS + BN_UP, "10"},
                {BIAS + BN_DOWN, "10"},
                {BN_POSITION, "10 20"},
                {BN_FINAL_NORM, "10"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (unsigned e = 0; e <= 9; e++)
            for (unsigned s = 0; s <= 3; s++) {
                const char pair[] = {(char)('0' + e), (char)('0' + s), 0};
                const bn_status expected = strstr(rows[i].allowed, pair) ? BN_OK : BN_ERR_TENSOR;
                const bn_status found = status_of(rows[i].role, e, s);
                CHECK_MSG(found == expected, "role %u, encoding and scope %s: status %d",
                          rows[i].role, pair, found);
            }
}

static void test_longest_rows(void) {
    ffn_dim = BN_TRIT_MAX_K;
    CHECK_EQ(status_of(BN_DOWN, BN_TERNARY_5TRIT, BN_SCALE_TENSOR), BN_OK);
    ffn_dim = BN_TRIT_MAX_K + 1;
    CHECK_EQ(status_of(BN_DOWN, BN_TERNARY_5TRIT, BN_SCALE_TENSOR), BN_ERR_TENSOR);
    CHECK_EQ(status_of(BN_DOWN, BN_TERNARY_2BIT, BN_SCALE_TENSOR), BN_OK);
    ffn_dim = BN_INT8_MAX_K;
    CHECK_EQ(status_of(BN_DOWN, BN_INT8_ROWS, BN_SCALE_ROW), BN_OK);
    ffn_dim = BN_INT8_MAX_K + 1;
    CHECK_EQ(status_of(BN_DOWN, BN_INT8_ROWS, BN_SCALE_ROW), BN_ERR_TENSOR);
}

int main(void) {
    test_formats();
    test_longest_rows();
    return 0;
}
