/* SPDX-License-Identifier: MIT
 *
 * test_file_stacks.c: the stack records. For every word, the first invalid value is refused, naming
 * the word.
 */
#define _POSIX_C_SOURCE 200809L
#include "file_check.h"

#define NOT_A_NUMBER 0x7FC00000u
#define INFINITE 0x7F800000u
#define MINUS_ONE 0xBF800000u

/* The decoder of tiny_file.h has n_heads 2, head_dim 8, tokens in, a head, RoPE, no experts. */
static const struct {
    uint8_t word;
    const char *name;
    uint32_t refused[5]; /* up to the first repetition of UINT32_MAX, which is always refused */
} words[] = {
    {0, "input", {4, UINT32_MAX}},
    {1, "mask", {3, UINT32_MAX}},
    {2, "vocab_size", {0, (1 << 21) + 1, UINT32_MAX}},
    {3, "dim", {0, 65537, UINT32_MAX}},
    {4, "n_layers", {0, 1025, UINT32_MAX}},
    {5, "n_heads", {0, 1025, UINT32_MAX}},
    {6, "n_kv_heads", {0, 3, UINT32_MAX}},
    {7, "head_dim", {0, 1025, UINT32_MAX}},
    {8, "ffn_dim", {0, 262145, UINT32_MAX}},
    {9, "max_context", {0, (1 << 24) + 1, UINT32_MAX}},
    {10, "sliding_window", {(1 << 24) + 1, UINT32_MAX}},
    {11, "norm", {2, UINT32_MAX}},
    {12, "norm_flags", {2 | 64 | 256, 512, UINT32_MAX}},
    {13, "norm_eps", {0, NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
    {14, "ffn", {2, UINT32_MAX}},
    {15, "activation", {5, UINT32_MAX}},
    {16, "n_experts", {65535, UINT32_MAX}},
    {16, "experts_per_token", {1, 65534, UINT32_MAX}}, /* is 0, expected at least 1 */
    {17, "experts_per_token", {1, UINT32_MAX}},
    {18, "position", {4, UINT32_MAX}},
    {18, "rope_dim", {1, 2, 3, UINT32_MAX}}, /* is 8, expected 0 without RoPE */
    {19, "rope_attention_factor", {0, NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
    {20, "bias_flags", {64, UINT32_MAX}},
    {21, "tie_embeddings", {2, UINT32_MAX}},
    {22, "embedding_scale", {0, NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
    {23, "residual_scale", {0, NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
    {24, "attention_scale", {0, NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
    {25, "attention_softcap", {NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
    {26, "logit_softcap", {NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
    {27, "pooling", {5, UINT32_MAX}},
    {28, "has_head", {2, UINT32_MAX}},
    {29, "rope_dim", {0, 1, 9, UINT32_MAX}},
    {29, "an even number", {7, UINT32_MAX}},
    {30, "global_every is 2 with sliding_window = 0", {2, UINT32_MAX}},
    {30, "global_every", {1, 1025, UINT32_MAX}},
    {31, "normalize_routing", {2, UINT32_MAX}},
    {32, "first_position", {2, UINT32_MAX}},
    {33, "image_size", {1, UINT32_MAX}}, /* words for images in a stack without images */
    {34, "patch_size", {1, UINT32_MAX}},
    {35, "channels", {1, UINT32_MAX}},
    {36, "channel 0", {1, NOT_A_NUMBER, UINT32_MAX}},
    {41, "channel 2", {1, NOT_A_NUMBER, UINT32_MAX}},
    {42, "class_token", {1, UINT32_MAX}},
    {43, "out_dim", {65537, UINT32_MAX}},
    {44, "similarity_scale", {NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
    {45, "similarity_bias", {NOT_A_NUMBER, INFINITE, UINT32_MAX}},
    {46, "image_token", {19, UINT32_MAX}},
    {47, "adapters", {1, 1 << 16, 1 << 23 | 1, UINT32_MAX}},
};

static void test_words(const uint8_t *good, size_t size) {
    const size_t stack = tiny_section(good, 1);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        for (size_t v = 0; words[i].refused[v] != UINT32_MAX; v++)
            file_forged_refused(good, size, stack + 4 * (size_t)words[i].word, 4,
                                words[i].refused[v], BN_ERR_CONFIG, words[i].name);
    for (size_t word = 0; word < 48; word++)
        CHECK(tiny_get(good + stack + 4 * word, 4) != UINT32_MAX);
}

static void test_relations(const uint8_t *good, size_t size) {
    const size_t stack = tiny_section(good, 1);
    uint8_t *copy = file_forge(good, size, stack + 4 * 5, 4, 512);
    file_forged_refused(copy, size, stack + 4 * 7, 4, 1024, BN_ERR_CONFIG,
                        "n_heads * head_dim is 524288, expected at most 262144");
    file_forged_refused(copy, size, stack + 4 * 6, 4, 3, BN_ERR_CONFIG,
                        "expected a multiple of n_kv_heads = 3");
    free(copy);
    copy = file_forge(good, size, stack + 192, 8, 0);
    file_forged_refused(copy, size, stack + 255, 1, 'x', BN_ERR_CONFIG, "name goes on");
    memset(copy + stack + 192, 'x', 64);
    file_forged_refused(copy, size, 0, 0, 0, BN_ERR_CONFIG, "name has 64 bytes");
    uint8_t *longest = file_forge(copy, size, stack + 255, 1, 0);
    CHECK_EQ(file_status(longest, size, NULL), BN_OK);
    free(longest);
    free(copy);
}

/* The vision stack: 5 x 5 pixels, 2 channels, patches of 2 x 2. */
static void test_images(void) {
    static const struct {
        uint8_t word;
        const char *name;
        uint32_t refused[5];
    } of_images[] = {
        {9, "max_context is 4, expected 5, the tokens of an image", {4, UINT32_MAX}},
        {33, "image_size", {0, (1 << 14) + 1, UINT32_MAX}},
        {33, "max_context is 5, expected 10", {6, 7, UINT32_MAX}},
        {33, "expected at most 67108864 values of pixels", {5793, 1 << 14, UINT32_MAX}},
        {34, "patch_size", {0, 6, UINT32_MAX}},
        {35, "channels", {0, 4, UINT32_MAX}},
        {35, "channel 1", {1, UINT32_MAX}},
        {35, "channel 2", {3, UINT32_MAX}}, /* its deviation is 0 */
        {36, "channel 0", {NOT_A_NUMBER, INFINITE, UINT32_MAX}},
        {39, "channel 0", {0, NOT_A_NUMBER, INFINITE, MINUS_ONE, UINT32_MAX}},
        {42, "max_context is 5, expected 4", {0, UINT32_MAX}},
        {42, "class_token", {2, UINT32_MAX}},
    };
    size_t size;
    uint8_t *good = tiny_file(tiny_everything, SIZE_MAX, SIZE_MAX, &size);
    const size_t stack = tiny_section(good, 1) + 2 * 256;
    for (size_t i = 0; i < sizeof of_images / sizeof *of_images; i++)
        for (size_t v = 0; of_images[i].refused[v] != UINT32_MAX; v++)
            file_forged_refused(good, size, stack + 4 * (size_t)of_images[i].word, 4,
                                of_images[i].refused[v], BN_ERR_CONFIG, of_images[i].name);
    free(good);
}

static void sixteen(tiny_writer *w) {
    for (int i = 0; i < 16; i++)
        tiny_bare(w);
}

static void seventeen(tiny_writer *w) {
    for (int i = 0; i < 17; i++)
        tiny_bare(w);
}

static void test_count(void) {
    size_t size;
    uint8_t *most = tiny_file(sixteen, SIZE_MAX, SIZE_MAX, &size);
    CHECK_EQ(file_status(most, size, NULL), BN_OK);
    file_forged_refused(most, size, tiny_section(most, 1) + 15 * 256 + 4 * 3, 4, 0, BN_ERR_CONFIG,
                        "stack 15: dim is 0, expected 1 to 65536");
    free(most);
    uint8_t *more = tiny_file(seventeen, SIZE_MAX, SIZE_MAX, &size);
    file_refused(more, size, BN_ERR_CONFIG, "17 stacks, expected 1 to 16");
    free(more);
}

int main(void) {
    size_t size;
    uint8_t *good = tiny_file(tiny_decoder, SIZE_MAX, SIZE_MAX, &size);
    CHECK_EQ(file_status(good, size, NULL), BN_OK);
    test_words(good, size);
    test_relations(good, size);
    test_images();
    test_count();
    free(good);
    return 0;
}
