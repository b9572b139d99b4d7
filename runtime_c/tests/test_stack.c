/* SPDX-License-Identifier: MIT
 *
 * test_stack.c: a stack read from a file, in which it may be the second; its mask and positions by
 * themselves.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "stack.h"

#include "tiny_file.h"

enum { DIM = 24, HEADS = 2, HEAD = 8, FFN = 20, LAYERS = 4, WINDOW = 5 };

/* Every second layer has no window; two position tables, no gate, a tied head with a bias. */
static void local_and_global(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    uint32_t words[48] = {0, 0, 19, DIM, LAYERS, HEADS, 1, HEAD, FFN, 32, WINDOW};
    words[12] = 1 | 32 | TINY_FINAL_NORM; /* pre-norm and QK norm */
    words[13] = tiny_float_bits(0.5f);
    words[14] = words[15] = 1; /* plain, SiLU */
    words[19] = tiny_float_bits(1.5f);
    words[20] = 8; /* head bias */
    words[21] = words[28] = 1;
    words[22] = words[23] = words[24] = one;
    words[29] = HEAD - 2;
    words[30] = 2;
    tiny_stack(w, words, "local_and_global");
    for (unsigned l = 0; l < LAYERS; l++) {
        tiny_tensor(w, l, 1, TINY_NONE, 0, 1, 0, 1, DIM);
        tiny_tensor(w, l, 2, TINY_NONE, 0, 4, 1, HEADS * HEAD, DIM);
        tiny_tensor(w, l, 3, TINY_NONE, 0, 4, 1, HEAD, DIM);
        tiny_tensor(w, l, 4, TINY_NONE, 0, 4, l == 3 ? 3 : 1, HEAD, DIM);
        tiny_tensor(w, l, 5, TINY_NONE, 0, 1, 0, 1, HEAD);
        tiny_tensor(w, l, 6, TINY_NONE, 0, 1, 0, 1, HEAD);
        tiny_tensor(w, l, 8, TINY_NONE, 0, 4, 1, DIM, HEADS * HEAD);
        tiny_tensor(w, l, 10, TINY_NONE, 0, 1, 0, 1, DIM);
        tiny_tensor(w, l, 13, TINY_NONE, 0, 4, 1, FFN, DIM);
        tiny_tensor(w, l, 15, TINY_NONE, 0, 4, 1, DIM, FFN);
    }
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 19, DIM);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, DIM);
    tiny_tensor(w, TINY_NONE, 67, TINY_NONE, 1, 1, 0, 1, 19);
    tiny_tensor(w, TINY_NONE, 69, TINY_NONE, 0, 1, 0, 1, HEAD / 2 - 1);
    tiny_tensor(w, TINY_NONE, 70, TINY_NONE, 0, 1, 0, 1, HEAD / 2 - 1);
}

static void two_stacks(tiny_writer *w) {
    tiny_decoder(w);
    local_and_global(w);
}

static void check_first(const bn_stack *s) {
    CHECK_EQ(s->config.n_layers, 2);
    CHECK(s->layers[1].ffn.kind == BN_FFN_GATED && s->layers[1].ffn.networks->gate.data != NULL);
    CHECK(s->layers[1].ffn.rectifies && s->layers[1].ffn.networks->sub_norm.gain != NULL);
    CHECK(s->layers[0].attn_sub_norm.gain != NULL && s->layers[0].q_norm.gain == NULL);
    CHECK(s->layers[0].mask.window == 0 && s->layers[0].table == 0);
    CHECK(s->positions.frequencies[0] != NULL && s->positions.frequencies[1] == NULL);
    CHECK(s->head.data == s->embedding.data && s->head.bias == NULL);
    CHECK_EQ(s->grouped, 1);
}

static void check_second(const bn_stack *s, const bn_file *f, const bn_kernels *kernels) {
    CHECK_EQ(s->config.n_layers, LAYERS);
    for (uint32_t i = 0; i < LAYERS; i++) {
        const bn_layer *l = &s->layers[i];
        const int global = i % 2 == 1;
        CHECK_EQ(l->part, !global);
        CHECK_EQ(l->place, i / 2);
        CHECK_EQ(l->mask.window, global ? 0 : WINDOW);
        CHECK_EQ(l->table, !global);
        CHECK(l->q.data == bn_file_tensor(f, 1, i, BN_Q, BN_NO_EXPERT).data);
        CHECK(l->q.data != bn_file_tensor(f, 0, i, BN_Q, BN_NO_EXPERT).data);
        CHECK(l->attn_norm.gain != NULL && l->attn_norm.eps == 0.5f);
        CHECK(l->q_norm.gain != NULL && l->k_norm.gain != NULL && l->q_norm.gain != l->k_norm.gain);
        CHECK(l->attn_sub_norm.gain == NULL && l->attn_post_norm.gain == NULL);
        CHECK(l->ffn.kind == BN_FFN_PLAIN && l->ffn.networks->gate.data == NULL &&
              l->ffn.networks->up.rows == FFN);
        CHECK(l->ffn.act == kernels->vectors.silu_gate && !l->ffn.rectifies);
    }
    CHECK(s->positions.dim == HEAD - 2 && s->positions.factor == 1.5f);
    CHECK(s->positions.frequencies[0] != NULL && s->positions.frequencies[1] != NULL);
    CHECK(s->head.data == s->embedding.data && s->head.bias != NULL && !s->embedding.bias);
    CHECK_EQ(s->grouped, 1);
}

/* A model with two such stacks is refused, but each of them can be read as a stack. */
static void test_two_stacks(void) {
    size_t size;
    uint8_t *bytes = tiny_file(two_stacks, SIZE_MAX, SIZE_MAX, &size);
    char detail[BN_DETAIL_SIZE] = "";
    bn_model *model;
    bn_kernels kernels;
    bn_stack stack;
    bn_file f;
    bn_kernels_scalar(&kernels);
    CHECK_MSG(bn_file_parse(bytes, size, &kernels, &f, detail) == BN_OK, "%s", detail);
    CHECK_EQ(bn_stack_open(&f, 0, &kernels, &stack), BN_OK);
    check_first(&stack);
    bn_stack_close(&stack);
    CHECK_EQ(bn_stack_open(&f, 1, &kernels, &stack), BN_OK);
    check_second(&stack, &f, &kernels);
    bn_stack_close(&stack);
    CHECK(stack.layers == NULL);
    bn_file_close(&f);
    CHECK_EQ(bn_model_open_bytes(bytes, size, NULL, &model, detail), BN_ERR_UNSUPPORTED);
    CHECK_MSG(strstr(detail, "more than one stack") != NULL, "%s", detail);
    free(bytes);
}

/* The range of keys equals bitnet/model/masks.py; its ends do not decrease. */
static void test_masks(void) {
    for (size_t window = 0; window < 9; window++)
        for (size_t prefix = 0; prefix < 30; prefix += 1 + prefix / 4)
            for (size_t row = 0; row < 30; row++) {
                const bn_mask mask = {.window = window, .prefix = prefix};
                for (size_t key = 0; key < 30; key++) {
                    const size_t distance = key < row ? row - key : key - row;
                    const int sees =
                        (key <= row || key < prefix) && (window == 0 || distance < window);
                    /* a row after the prefix also sees the keys in between, so that this is a
                     * range */
                    CHECK_EQ(key >= bn_mask_first(mask, row) && key < bn_mask_end(mask, row), sees);
                }
                CHECK(bn_mask_first(mask, row) <= bn_mask_first(mask, row + 1));
                CHECK(bn_mask_end(mask, row) <= bn_mask_end(mask, row + 1));
            }
}

static void test_original(void) {
    size_t size;
    uint8_t *bytes = tiny_file(tiny_original, SIZE_MAX, SIZE_MAX, &size);
    bn_kernels kernels;
    bn_stack stack;
    bn_file f;
    bn_kernels_scalar(&kernels);
    CHECK_EQ(bn_file_parse(bytes, size, &kernels, &f, NULL), BN_OK);
    CHECK_EQ(bn_stack_open(&f, 0, &kernels, &stack), BN_OK);
    const bn_layer *l = &stack.layers[1];
    CHECK(l->attn_norm.gain == NULL && l->ffn.norm.gain == NULL && stack.final_norm.gain == NULL);
    const bn_norm norms[] = {l->attn_post_norm, l->ffn.post_norm, stack.embedding_norm};
    for (int i = 0; i < 3; i++)
        CHECK(norms[i].gain && norms[i].bias && norms[i].kind == BN_NORM_LAYER);
    CHECK(l->ffn.act == kernels.vectors.gelu_erf_gate && !l->ffn.rectifies);
    CHECK(stack.positions.dim == 0 && stack.positions.vectors.rows == 270);
    CHECK(stack.head.data != stack.embedding.data && stack.head.bias != NULL);
    float x[24], y[24], row[24];
    stack.positions.vectors.encoding->row(&kernels, &stack.positions.vectors, 269, row);
    for (int i = 0; i < 24; i++)
        x[i] = (float)i;
    bn_positions_add(&stack.positions, &kernels, 269, x, y);
    for (int i = 0; i < 24; i++)
        CHECK(x[i] == (float)i + row[i] && row[i] != 0);
    bn_stack_close(&stack);
    bn_file_close(&f);
    free(bytes);
}

/* A missing norm passes everything through, and reports values that are not finite. */
static void test_no_norm(void) {
    const bn_norm none = {0};
    const float x[] = {1, -2, 3e38f, 4};
    float y[4], bad[] = {1, 2, INFINITY};
    bn_kernels kernels;
    bn_kernels_scalar(&kernels);
    CHECK(bn_norm_row(&kernels, &none, y, x, 4) && memcmp(x, y, sizeof x) == 0);
    CHECK(!bn_norm_row(&kernels, &none, bad, bad, 3) && bn_norm_row(&kernels, &none, bad, bad, 2));
}

/* Each pair of a head is rotated by the angle of its frequency, and no other value changes. */
static void test_positions(void) {
    const float frequencies[] = {1, 0.25f, 0.001f};
    for (int32_t position = 0; position < 3000; position += 7) {
        const bn_positions p = {
            .dim = 6, .first = position % 2, .factor = 2, .frequencies = {NULL, frequencies}};
        float angle[6], head[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        bn_positions_angles(&p, 1, position, angle);
        bn_positions_rotate(head, angle, p.dim);
        for (int i = 0; i < 3; i++) {
            const double a = (double)((float)(position + p.first) * frequencies[i]);
            const double x = i + 1, y = i + 4;
            /* fp32 error of a cosine, a sine, two products and a sum below 15 */
            CHECK(fabs(head[i] - 2 * (x * cos(a) - y * sin(a))) < 4e-6);
            CHECK(fabs(head[i + 3] - 2 * (y * cos(a) + x * sin(a))) < 4e-6);
        }
        CHECK(head[6] == 7 && head[7] == 8);
    }
}

int main(void) {
    test_two_stacks();
    test_original();
    test_no_norm();
    test_masks();
    test_positions();
    return 0;
}
