/* SPDX-License-Identifier: MIT
 *
 * test_file_hostile.c: every prefix of a packed file, every single-byte change, forged tables and
 * random changes with valid checksums: refused, or proven harmless. Run it under AddressSanitizer;
 * the bytes are in memory of exactly their size.
 */
#define _POSIX_C_SOURCE 200809L
#include "file_check.h"
#include "linear/sketch.h"

static bn_kernels kernels;

static bn_status forged(const uint8_t *good, size_t size, size_t offset, size_t n, uint64_t value,
                        char *detail) {
    uint8_t *copy = file_forge(good, size, offset, n, value);
    const bn_status status = file_status(copy, size, detail);
    free(copy);
    return status;
}

static void test_prefixes(const uint8_t *good, size_t size) {
    for (size_t n = 0; n < size; n++)
        CHECK_MSG(file_status(good, n, NULL) == BN_ERR_TRUNCATED, "prefix of %zu bytes", n);
    uint8_t *longer = tiny_alloc(size + 64);
    memcpy(longer, good, size);
    memset(longer + size, 0, 64);
    for (size_t n = 1; n <= 64; n++)
        CHECK_EQ(file_status(longer, size + n, NULL), BN_ERR_TRAILING);
    free(longer);
}

/* Change every byte of header and table to every value, every other byte to eight values. */
static void test_byte_changes(const uint8_t *good, size_t size) {
    static const uint8_t flips[] = {0x01, 0x02, 0x04, 0x08, 0x10, 0x55, 0x80, 0xFF};
    uint8_t *copy = tiny_copy(good, size);
    const size_t tables = tiny_section(good, 1);
    bn_file f;
    for (size_t i = 0; i < size; i++)
        for (unsigned v = 1; v < 256; v = v + 1) {
            if (i >= tables && v > sizeof flips)
                break;
            copy[i] = good[i] ^ (i < tables ? (uint8_t)v : flips[v - 1]);
            bn_status status = bn_file_parse(copy, size, &kernels, &f, NULL);
            if (status == BN_OK)
                status = bn_file_verify(&f, &kernels, NULL, NULL);
            bn_file_close(&f);
            CHECK_MSG(status != BN_OK, "byte %zu as %u was accepted", i, copy[i]);
            copy[i] = good[i];
        }
    free(copy);
}

/* With forged checksums: no other value of any byte of the header, the section table, the tensor
 * table or any padding is accepted, and none of a word of a stack that determines which tensors
 * there are. */
static void test_forged_tables(const uint8_t *good, size_t size) {
    static const uint64_t hostile[] = {0, 1, 2, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFC0, 0xFFFFFFFF};
    static const uint8_t free_words[] = {0,  1,  9,  10, 11, 13, 15, 19, 22, 23,
                                         24, 25, 26, 27, 28, 31, 32, 44, 45, 46};
    const size_t stack = tiny_section(good, 1), tensors = tiny_section(good, 2);
    const size_t tensors_end = tensors + (size_t)tiny_get(good + tiny_entry(good, 2) + 16, 8);
    for (size_t i = 0; i < tensors_end; i++) {
        const size_t in_entry = i % 32;
        const int is_crc = (i >= 60 && i < 64) || (i >= 64 && i < 192 && in_entry / 4 == 1);
        /* METADATA may become TOKENIZER, and may be a few bytes longer: padding becomes content. */
        const int harmless = i == tiny_entry(good, 3) || i == tiny_entry(good, 3) + 16;
        if (is_crc || harmless || (i >= stack && i < tensors))
            continue;
        /* Scales of 8 rows and those of a group in 16 rows have the same size. */
        const int is_scope = i >= tensors && (i - tensors) % 64 == 10 && good[i] >= BN_SCALE_ROW;
        for (unsigned flip = is_scope ? 2 : 1; flip < 256; flip += flip < 8 ? 1 : 19)
            CHECK_MSG(forged(good, size, i, 1, good[i] ^ flip, NULL) != BN_OK,
                      "byte %zu as %u was accepted", i, good[i] ^ flip);
    }
    for (size_t at = 64; at < tensors_end; at += 8) { /* every 64-bit field, the dims in pairs */
        const int is_crc = at < 192 && at % 32 < 8;
        if (is_crc || (at >= stack && at < tensors))
            continue;
        for (size_t v = 0; v < 2 * sizeof hostile / sizeof *hostile; v++) {
            const uint64_t value = v % 2 ? hostile[v / 2] << 32 | hostile[v / 2] : ~hostile[v / 2];
            if (value != tiny_get(good + at, 8))
                CHECK(forged(good, size, at, 8, value, NULL) != BN_OK);
        }
    }
    for (size_t word = 0; word < 48; word++)
        for (size_t v = 0; v < sizeof hostile / sizeof *hostile; v++) {
            if (hostile[v] == tiny_get(good + stack + 4 * word, 4))
                continue;
            char detail[BN_DETAIL_SIZE] = "";
            const bn_status status = forged(good, size, stack + 4 * word, 4, hostile[v], detail);
            const int may_pass = memchr(free_words, (int)word, sizeof free_words) != NULL;
            CHECK_MSG(status == BN_ERR_CONFIG || status == BN_ERR_TENSOR ||
                          (status == BN_OK && may_pass),
                      "word %zu = %" PRIu64 ": status %d %s", word, hostile[v], status, detail);
        }
}

/* Many random changes at once, with valid checksums. Whatever the result, nothing crashes. */
static void test_random_changes(const uint8_t *good, size_t size) {
    uint64_t random = 7;
    uint8_t *copy = tiny_copy(good, size);
    for (int round = 0; round < 10000; round++) {
        memcpy(copy, good, size);
        for (size_t n = 1 + check_below(&random, 4); n > 0; n--) {
            const size_t at = check_below(&random, check_below(&random, 2) ? size : 2000);
            copy[at] ^= (uint8_t)(1u << check_below(&random, 8));
        }
        tiny_fix_checksums(copy, size);
        (void)file_status(copy, size, NULL);
    }
    free(copy);
}

/* --- a file of more than one block, verified in shares --- */

static void wide(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1.0f);
    const uint32_t words[48] = {[2] = 320,  [3] = 640,  [4] = 1,
                                [5] = 1,    [6] = 1,    [7] = 64,
                                [8] = 640,  [9] = 8,    [12] = TINY_FINAL_NORM,
                                [13] = one, [14] = 1,   [18] = 3,
                                [19] = one, [21] = 1,   [22] = one,
                                [23] = one, [24] = one, [28] = 1};
    tiny_stack(w, words, "wide");
    tiny_tensor(w, 0, 2, TINY_NONE, 0, 4, 1, 64, 640);
    tiny_tensor(w, 0, 3, TINY_NONE, 0, 2, 0, 64, 640);
    tiny_tensor(w, 0, 4, TINY_NONE, 0, 1, 0, 64, 640);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 2, 640, 64);
    tiny_tensor(w, 0, 13, TINY_NONE, 0, 4, 3, 640, 640);
    tiny_tensor(w, 0, 15, TINY_NONE, 0, 5, 2, 640, 640);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 9, 2, 320, 640);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 640);
}

/* The answer does not depend on the number of threads. */
static void same_answer(const uint8_t *bytes, size_t size, bn_pool **pools, bn_status expected) {
    char alone[BN_DETAIL_SIZE] = "", detail[BN_DETAIL_SIZE] = "";
    bn_file f;
    CHECK_EQ(bn_file_parse(bytes, size, &kernels, &f, NULL), BN_OK);
    const bn_status status = bn_file_verify(&f, &kernels, NULL, alone);
    CHECK_MSG(status == expected, "status %d (%s), expected %d", status, alone, expected);
    for (; *pools != NULL; pools++) {
        CHECK_EQ(bn_file_verify(&f, &kernels, *pools, detail), status);
        CHECK_MSG(strcmp(detail, alone) == 0, "\"%s\", alone \"%s\"", detail, alone);
    }
    bn_file_close(&f);
}

/* Make one value of a tensor invalid for verify. */
static void spoil(uint8_t *bytes, const uint8_t *record, uint64_t *random) {
    /* By encoding: NaN, NaN, a code 3, a byte that is not five trits, a code of -128. */
    static const uint32_t bad[] = {0,          0x7FC00000, 0x7E007E00, 0, 0x03030303,
                                   0x01010101, 0x80808080, 0,          0, 0x80808080};
    const size_t encoding = record[9], size = (size_t)tiny_get(record + 32, 8);
    uint8_t *data = bytes + tiny_section(bytes, 6) + (size_t)tiny_get(record + 24, 8);
    const size_t end = encoding == BN_INT8_SKETCH ? size / 2 : size; /* within its codes */
    tiny_put(data + check_below(random, end) / 4 * 4, bad[encoding], 4);
}

/* A sketch, a step or a deviation that does not follow from the codes is refused, and those of
 * padding rows unless they are finite and >= 0. Codes past the end of a row or a column do not
 * matter. */
static void test_sketch(const uint8_t *good, size_t size, const uint8_t *record, bn_pool **pools) {
    uint64_t random = 11;
    static const uint32_t bad[] = {0x7F800000, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000000};
    const bn_sketch_parts at = bn_sketch_at(tiny_get(record + 16, 4), tiny_get(record + 20, 4));
    const size_t data = tiny_section(good, 6) + (size_t)tiny_get(record + 24, 8);
    const size_t end = data + (size_t)tiny_get(record + 32, 8);
    CHECK_EQ(record[9], BN_INT8_SKETCH);
    for (size_t i = 0; i < 5; i++) {
        const size_t places[] = {data + at.step, data + at.deviation - 4, data + at.deviation,
                                 end - 4};
        for (size_t j = 0; j < 4; j++) {
            uint8_t *spoilt = tiny_copy(good, size);
            tiny_put(spoilt + places[j], bad[i], 4);
            tiny_fix_checksums(spoilt, size);
            same_answer(spoilt, size, pools, BN_ERR_SCALE);
            free(spoilt);
        }
    }
    for (size_t i = 0; i < 60; i++) { /* one bit, of a code or of something derived from it */
        const size_t rows = (size_t)tiny_get(record + 16, 4); /* whole panels of whole tiles */
        const size_t ends[] = {at.step, at.step + 4 * rows, at.deviation + 4 * rows};
        const size_t begins[] = {0, at.step, at.deviation};
        const size_t part = i % 3,
                     at_byte = begins[part] + check_below(&random, ends[part] - begins[part]);
        uint8_t *spoilt = tiny_copy(good, size);
        spoilt[data + at_byte] ^= 1;
        tiny_fix_checksums(spoilt, size);
        same_answer(spoilt, size, pools, BN_ERR_CODE);
        free(spoilt);
    }
}

/* A row of zeros has a sketch like any other. Of two wrong rows the first is found, although the
 * part with the other ends later. */
static void test_rows_of_a_sketch(void) {
    enum { ROWS = 600, COLS = 20, ZEROS = 7, FIRST = 130, LAST = 599, STRIDE = 64 };
    uint8_t *data = tiny_alloc(tiny_sketch_size(ROWS, COLS));
    uint64_t random = 13;
    bn_pool *alone;
    CHECK_EQ(bn_pool_new(1, &alone), BN_OK);
    memset(data, 0, ROWS * STRIDE);
    for (size_t row = 0; row < ROWS; row++)
        for (size_t k = 0; k < COLS && row != ZEROS; k++)
            data[row * STRIDE + k] = (uint8_t)check_below(&random, 100);
    tiny_sketch(data, ROWS, COLS);
    CHECK_EQ(bn_wrong_sketch(data, ROWS, COLS, &kernels, alone), ROWS);
    data[LAST * STRIDE] ^= 1;
    CHECK_EQ(bn_wrong_sketch(data, ROWS, COLS, &kernels, alone), LAST);
    data[FIRST * STRIDE] ^= 1;
    CHECK_EQ(bn_wrong_sketch(data, ROWS, COLS, &kernels, alone), FIRST);
    bn_pool_free(alone);
    free(data);
}

static void test_shares(void) {
    size_t size;
    uint8_t *good = tiny_file(wide, SIZE_MAX, SIZE_MAX, &size);
    const size_t data = tiny_section(good, 6), tensors = tiny_section(good, 2);
    uint64_t random = 5;
    bn_pool *pools[4] = {NULL};
    for (int i = 0; i < 3; i++)
        CHECK_EQ(bn_pool_new((const int32_t[]){2, 3, 64}[i], &pools[i]), BN_OK);
    CHECK_MSG(size > 400000, "%zu bytes", size);
    same_answer(good, size, pools, BN_OK);
    for (size_t i = 0; i < 40; i++) {
        const size_t at = data + check_below(&random, size - 64 - data);
        good[at] ^= 0x10;
        same_answer(good, size, pools, BN_ERR_CHECKSUM);
        good[at] ^= 0x10;
    }
    for (size_t tensor = 0; tensor < 8; tensor++) {
        const uint8_t *record = good + tensors + 64 * tensor;
        const int is_float = record[9] == BN_F32 || record[9] == BN_F16;
        uint8_t *spoilt = tiny_copy(good, size);
        spoil(spoilt, record, &random);
        tiny_fix_checksums(spoilt, size);
        same_answer(spoilt, size, pools, is_float ? BN_ERR_SCALE : BN_ERR_CODE);
        free(spoilt);
    }
    test_sketch(good, size, good + tensors + 64 * 6, pools);
    uint8_t *spoilt = tiny_copy(good, size); /* of all that is wrong, the first is reported */
    for (size_t tensor = 0; tensor < 8; tensor++)
        spoil(spoilt, good + tensors + 64 * tensor, &random);
    tiny_fix_checksums(spoilt, size);
    same_answer(spoilt, size, pools, BN_ERR_CODE);
    file_refused(spoilt, size, BN_ERR_CODE, "layers.0.q.weight");
    free(spoilt);
    for (int i = 0; i < 3; i++)
        bn_pool_free(pools[i]);
    free(good);
}

int main(void) {
    size_t size;
    bn_kernels_scalar(&kernels);
    uint8_t *good = tiny_file(tiny_decoder, SIZE_MAX, SIZE_MAX, &size);
    CHECK_EQ(file_status(good, size, NULL), BN_OK);
    test_prefixes(good, size);
    test_byte_changes(good, size);
    test_forged_tables(good, size);
    test_random_changes(good, size);
    test_shares();
    test_rows_of_a_sketch();
    free(good);
    return 0;
}
