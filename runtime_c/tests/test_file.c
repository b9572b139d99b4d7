/* SPDX-License-Identifier: MIT
 *
 * test_file.c: the reader of packed files accepts what export/FORMAT.md allows, and has a status
 * and an explanation for each refusal. More refusals are in test_file_hostile.c.
 */
#define _POSIX_C_SOURCE 200809L
#include "file_check.h"

static bn_kernels kernels;

/* --- what is accepted --- */

static void test_views(const uint8_t *good, size_t size) {
    bn_file f;
    CHECK_EQ(bn_file_parse(good, size, &kernels, &f, NULL), BN_OK);
    CHECK_EQ(bn_file_verify(&f, &kernels, NULL, NULL), BN_OK);
    CHECK_EQ(f.n_stacks, 1);
    CHECK_EQ(f.n_tensors, 25);
    CHECK_EQ(f.stacks[0].dim, 24);
    CHECK_EQ(f.stacks[0].rope_dim, 8);
    CHECK(f.stacks[0].attention_scale == 0.35f);
    CHECK(strcmp(f.stacks[0].name, "decoder") == 0);
    CHECK(f.section_size[BN_SECTION_METADATA] == 25 && f.section[BN_SECTION_METADATA][0] == '{');
    CHECK(f.section[BN_SECTION_TOKENIZER] == NULL && f.section_size[BN_SECTION_TOKENIZER] == 0);

    const bn_tensor o = bn_file_tensor(&f, 0, 1, BN_O, BN_NO_EXPERT);
    CHECK(o.rows == 24 && o.cols == 16 && o.bytes == 128 &&
          o.encoding == bn_encoding_of(BN_TERNARY_2BIT));
    CHECK(o.scale_scope == BN_SCALE_GROUP && o.bias == NULL && o.data >= f.data);
    CHECK((const uint8_t *)o.group_scales == o.data + 128 && o.scales == NULL);
    CHECK(o.group_scales[23] > 0 && o.group_scales[23] < 0x7C00);
    const bn_tensor frequencies =
        bn_file_tensor(&f, 0, BN_NO_LAYER, BN_ROPE_FREQUENCIES, BN_NO_EXPERT);
    CHECK(frequencies.cols == 4 && frequencies.scales == NULL);
    CHECK(frequencies.data + frequencies.bytes == f.data + f.data_size);
    CHECK(bn_file_tensor(&f, 0, BN_NO_LAYER, BN_HEAD, BN_NO_EXPERT).data == NULL);
    CHECK(bn_file_tensor(&f, 0, 2, BN_Q, BN_NO_EXPERT).data == NULL);
    CHECK(bn_file_tensor(&f, 0, 0, BN_Q_NORM, BN_NO_EXPERT).data == NULL);
    bn_file_close(&f);
    CHECK(f.tensors == NULL && f.tables == NULL);
}

static void test_everything(void) {
    size_t size;
    uint8_t *good = tiny_file(tiny_everything, SIZE_MAX, SIZE_MAX, &size);
    char detail[BN_DETAIL_SIZE] = "";
    bn_file f;
    CHECK_MSG(file_status(good, size, detail) == BN_OK, "%s", detail);
    CHECK_EQ(bn_file_parse(good, size, &kernels, &f, NULL), BN_OK);
    CHECK_EQ(f.n_stacks, 4);
    const bn_tensor q = bn_file_tensor(&f, 0, 1, BN_Q, BN_NO_EXPERT);
    CHECK(q.data && q.bias && q.scale_scope == BN_SCALE_GROUP && q.group_scales != NULL);
    CHECK(bn_file_tensor(&f, 0, BN_NO_LAYER, BN_HEAD, BN_NO_EXPERT).bias != NULL);
    CHECK(bn_file_tensor(&f, 0, 0, BN_LINEAR_NORM + BN_O, BN_NO_EXPERT).cols == 16);

    const bn_record half = f.tensors[4];
    CHECK_EQ(half.encoding, BN_F16);
    file_forged_refused(good, size, tiny_section(good, 6) + half.offset + 2, 2, 0xFC00,
                        BN_ERR_SCALE, "layers.0.k.weight: a value is not finite");

    char name[BN_NAME_SIZE];
    bn_record r = f.tensors[f.n_tensors - 2];
    bn_record_name(&r, name);
    CHECK_MSG(strcmp(name, "stacks.3.draft_embedding_norm.weight") == 0, "%s", name);
    r = (bn_record){.stack = 2, .role = BN_DOWN, .expert = BN_NO_EXPERT, .part = BN_ADAPTER_IN};
    bn_record_name(&r, name);
    CHECK_MSG(strcmp(name, "stacks.2.layers.0.down.adapter_in") == 0, "%s", name);
    r = (bn_record){.layer = BN_NO_LAYER, .role = BN_POOL_PROBE, .expert = BN_NO_EXPERT};
    bn_record_name(&r, name);
    CHECK_MSG(strcmp(name, "pool_probe") == 0, "%s", name);
    r = (bn_record){.layer = 3, .role = BN_LINEAR_NORM + BN_GATE, .expert = 7, .part = 1};
    bn_record_name(&r, name);
    CHECK_MSG(strcmp(name, "layers.3.experts.7.gate_linear_norm.bias") == 0, "%s", name);
    r = (bn_record){.stack = 65535, .layer = 65534, .role = 65535, .expert = 65534};
    bn_record_name(&r, name);
    CHECK_MSG(strcmp(name, "stacks.65535.layers.65534.experts.65534.role 65535.weight") == 0, "%s",
              name);

    /* Each tensor left out, then each written twice: the table must be exact. */
    const size_t n = f.n_tensors;
    bn_file_close(&f);
    free(good);
    for (size_t i = 0; i < n; i++)
        for (int twice = 0; twice < 2; twice++) {
            uint8_t *file =
                tiny_file(tiny_everything, twice ? SIZE_MAX : i, twice ? i : SIZE_MAX, &size);
            file_refused(file, size, BN_ERR_TENSOR,
                         i + 1 < n ? ""
                         : twice   ? "expected the end of the table"
                                   : "is missing");
            free(file);
        }
}

static void test_sections(const uint8_t *good, size_t size) {
    /* METADATA as a section kind that a later version might add. */
    const size_t entry = tiny_entry(good, BN_SECTION_METADATA);
    uint8_t *copy = tiny_copy(good, size);
    uint8_t data_entry[32];
    memcpy(data_entry, copy + entry + 32, 32);
    CHECK_EQ(tiny_get(data_entry, 4), BN_SECTION_DATA);
    memcpy(copy + entry + 32, copy + entry, 32); /* an optional section must follow DATA ... */
    memcpy(copy + entry, data_entry, 32);
    const size_t data = tiny_section(good, 6), data_size = (size_t)tiny_get(data_entry + 16, 8);
    const size_t start = tiny_section(good, 3);
    memmove(copy + start, good + data, data_size); /* ... so swap the two */
    memset(copy + start + data_size, 0, size - start - data_size);
    memcpy(copy + start + tiny_align(data_size), good + start, 25);
    tiny_put(copy + entry + 8, start, 8);
    tiny_put(copy + entry + 32, 1000, 4);
    tiny_put(copy + entry + 40, start + tiny_align(data_size), 8);
    tiny_put(copy + entry + 56, 1, 4);
    tiny_fix_checksums(copy, size);
    CHECK_EQ(file_status(copy, size, NULL), BN_OK);
    tiny_put(copy + entry + 56, 0, 4);
    tiny_fix_checksums(copy, size);
    file_refused(copy, size, BN_ERR_VERSION, "section kind 1000 is required");
    free(copy);

    copy = file_forge(good, size, entry, 4, BN_SECTION_TEMPLATE);
    CHECK_EQ(file_status(copy, size, NULL), BN_OK);
    file_forged_refused(copy, size, entry + 16, 8, 256 * 1024 + 1, BN_ERR_SECTION,
                        "section TEMPLATE has 262145 bytes, expected at most 262144");
    file_forged_refused(copy, size, entry + 16, 8, 256 * 1024, BN_ERR_SECTION, "kind 5 is 262144");
    file_forged_refused(copy, size, entry + 16, 8, 0, BN_ERR_SECTION, "TEMPLATE has 0 bytes");
    free(copy);
}

/* --- what is refused: each status, with its explanation --- */

static void test_statuses(const uint8_t *good, size_t size) {
    char detail[BN_DETAIL_SIZE];
    bn_file f;
    const size_t stack = tiny_section(good, 1), tensors = tiny_section(good, 2);
    const size_t meta = tiny_section(good, 3), data = tiny_section(good, 6);
    const size_t q = tensors + 64, q_data = data + (size_t)tiny_get(good + q + 24, 8);
    const size_t q_scale = data + (size_t)tiny_get(good + q + 40, 8);
    const size_t embedding = tensors + 22 * 64;
    const size_t table = data + (size_t)tiny_get(good + embedding + 24, 8);

    uint8_t *shifted = tiny_alloc(size + 1);
    memcpy(shifted + 1, good, size);
    CHECK_EQ(bn_file_parse(shifted + 1, size, &kernels, &f, detail), BN_ERR_ARGUMENT);
    CHECK(strstr(detail, "multiple of 64"));
    free(shifted);

    file_refused(good, 0, BN_ERR_TRUNCATED, "empty");
    file_refused(good, 5, BN_ERR_TRUNCATED, "5 bytes");
    file_refused(good, size - 64, BN_ERR_TRUNCATED, "its header says");
    file_forged_refused(good, size, 0, 1, 'x', BN_ERR_MAGIC, "begins with 78 42 49 54");
    file_forged_refused(good, size, 8, 4, 2, BN_ERR_VERSION, "version is 2, expected 3");
    file_forged_refused(good, size, 12, 4, 4, BN_ERR_VERSION, "flags are 0x4");
    file_forged_refused(good, size, 16, 8, size - 64, BN_ERR_TRAILING, "its header says");
    file_forged_refused(good, size, 16, 8, UINT64_MAX, BN_ERR_TRUNCATED, "its header says");
    file_forged_refused(good, size, 24, 4, 2, BN_ERR_SECTION,
                        "section_count is 2, expected 3 to 64");
    file_forged_refused(good, size, 24, 4, 65, BN_ERR_SECTION,
                        "section_count is 65, expected 3 to");
    file_forged_refused(good, size, 40, 1, 1, BN_ERR_VERSION, "reserved bytes");
    file_forged_refused(good, size, tiny_entry(good, 3), 4, 2, BN_ERR_SECTION, "2 follows kind 2");
    file_forged_refused(good, size, tiny_entry(good, 6) + 16, 8, 64, BN_ERR_SECTION,
                        "the last section ends at");
    file_forged_refused(good, size, tiny_entry(good, 6) + 16, 1, good[tiny_entry(good, 6) + 16] + 1,
                        BN_ERR_TENSOR, "expected at the end of DATA");
    file_forged_refused(good, size, meta + 30, 1, 1, BN_ERR_SECTION,
                        "padding before section kind 6");
    file_forged_refused(good, size, size - 1, 1, 1, BN_ERR_SECTION, "padding at the end");
    file_forged_refused(good, size, tiny_entry(good, 6), 4, 4, BN_ERR_SECTION, "DATA is missing");
    file_forged_refused(good, size, tiny_entry(good, 3) + 8, 8, meta + 64, BN_ERR_SECTION,
                        "expected at");
    file_forged_refused(good, size, tiny_entry(good, 2) + 16, 8, 65, BN_ERR_SECTION,
                        "TENSORS has 65 bytes");
    file_forged_refused(good, size, tiny_entry(good, 1) + 28, 4, 1, BN_ERR_SECTION,
                        "reserved word");
    file_forged_refused(good, size, tiny_entry(good, 3) + 24, 4, 1, BN_ERR_VERSION, "flags");

    file_forged_refused(good, size, q + 16, 4, 17, BN_ERR_TENSOR,
                        "layers.0.q.weight: rows is 17, expected 16");
    file_forged_refused(good, size, q + 4, 2, 3, BN_ERR_TENSOR,
                        "tensor 1 is layers.0.k.weight, expected layers.0.q.weight");
    file_forged_refused(good, size, q + 9, 1, 6, BN_ERR_TENSOR, "encoding 6 with scale scope 1");
    file_forged_refused(good, size, q + 24, 8, 64, BN_ERR_TENSOR, "offset is 64, expected 128");
    file_forged_refused(good, size, stack + 4 * 8, 4, 262144, BN_ERR_TENSOR, "ends past DATA");
    file_forged_refused(good, size, stack + 4 * 4, 4, 1, BN_ERR_TENSOR,
                        "tensor 11 is layers.1.attn_norm.weight, expected embedding.weight");
    file_forged_refused(good, size, data + 4 * 24, 1, 1, BN_ERR_TENSOR,
                        "layers.0.q.weight: the padding before it is not zero");

    file_forged_refused(good, size, data + 4, 4, 0xFF800000, BN_ERR_SCALE,
                        "attn_norm.weight: a value");
    file_forged_refused(good, size, q_scale, 4, 0x007FFFFF, BN_ERR_SCALE,
                        "layers.0.q.weight: a scale");
    const size_t o = tensors + 5 * 64, o_scale = data + (size_t)tiny_get(good + o + 40, 8);
    CHECK_EQ(tiny_get(good + o + 4, 2), BN_O);
    for (size_t i = 0; i < 5; i++) /* in the first row and in a padding row */
        file_forged_refused(good, size, o_scale + (i % 2 ? 62 : 0), 2,
                            (const uint64_t[]){0, 0x8000, 0x7C00, 0x7E01, 0xBC00}[i], BN_ERR_SCALE,
                            "layers.0.o.weight: a group scale is not finite and > 0");
    file_forged_refused(good, size, q_data + 9, 1, 0xC0, BN_ERR_CODE,
                        "layers.0.q.weight: a ternary code");
    file_forged_refused(good, size, table + 3, 1, 0x80, BN_ERR_CODE, "embedding.weight: an int8");

    /* Without new checksums, damage is reported as damage, not as what the bytes now mean. */
    for (size_t i = 0; i < 3; i++) {
        const size_t at[] = {meta + 2, q_data + 9, 64 + 8};
        const char *text[] = {"METADATA", "section DATA", "header and section table"};
        uint8_t *damaged = tiny_copy(good, size);
        damaged[at[i]] ^= 0xC0;
        file_refused(damaged, size, BN_ERR_CHECKSUM, text[i]);
        free(damaged);
    }
}

static void two_tables(tiny_writer *w) {
    tiny_decoder(w);
    tiny_put(w->stacks + 4 * 10, 5, 4); /* sliding_window */
    tiny_put(w->stacks + 4 * 30, 2, 4); /* global_every */
    tiny_tensor(w, TINY_NONE, BN_ROPE_LOCAL_FREQUENCIES, TINY_NONE, 0, 1, 0, 1, 4);
}

static void test_frequencies(void) {
    const struct {
        float value;
        bn_status status;
    } cases[] = {{541200.4375f, BN_OK}, {-541200.4375f, BN_OK}, {541200.5f, BN_ERR_SCALE},
                 {-1e7f, BN_ERR_SCALE}, {3e38f, BN_ERR_SCALE},  {0, BN_OK}};
    size_t size; /* the last position is 31; 31 * 541200.5, rounded, is 2^24 */
    uint8_t *good = tiny_file(two_tables, SIZE_MAX, SIZE_MAX, &size);
    for (size_t table = 24; table <= 25; table++) {
        const size_t record = tiny_section(good, 2) + 64 * table;
        const size_t at = tiny_section(good, 6) + (size_t)tiny_get(good + record + 24, 8) + 4;
        CHECK_EQ(tiny_get(good + record + 4, 2), BN_ROPE_FREQUENCIES + table - 24);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            const uint32_t bits = tiny_float_bits(cases[i].value);
            uint8_t *copy = file_forge(good, size, at, 4, bits);
            CHECK_MSG(file_status(copy, size, NULL) == cases[i].status, "%g",
                      (double)cases[i].value);
            free(copy);
        }
        file_forged_refused(good, size, at, 4, tiny_float_bits(1e6f), BN_ERR_SCALE,
                            "frequencies: frequency 1 is 1e+06, which at position 31 makes an "
                            "angle of 3.1e+07, expected below 1.67772e+07");
        uint8_t *later = file_forge(good, size, tiny_section(good, 1) + 4 * 32, 4, 1);
        file_forged_refused(later, size, at, 4, tiny_float_bits(541200.4375f), BN_ERR_SCALE,
                            "at position 32"); /* first_position is 1 */
        free(later);
    }
    free(good);
}

/* The format is recognized after blanks, but only near the beginning. */
static void test_foreign(void) {
    uint8_t bytes[8192];
    memset(bytes, ' ', sizeof bytes);
    memcpy(bytes + 4000, "{}", 2);
    file_refused(bytes, sizeof bytes, BN_ERR_MAGIC, "JSON text");
    memset(bytes, '\n', sizeof bytes); /* beyond the bytes examined */
    memcpy(bytes + 4096, "{}", 2);
    file_refused(bytes, sizeof bytes, BN_ERR_MAGIC,
                 "bitnet export writes it; this one begins with 0a 0a");
}

/* Of the 256 byte values, those that encode five codes are accepted, anywhere. */
static void test_trits(void) {
    size_t size;
    uint8_t *good = tiny_file(tiny_decoder, SIZE_MAX, SIZE_MAX, &size);
    const size_t tensors = tiny_section(good, 2), data = tiny_section(good, 6);
    size_t up = tensors;
    while (tiny_get(good + up + 4, 2) != BN_UP)
        up += 64;
    const size_t bytes = data + (size_t)tiny_get(good + up + 24, 8);
    int is_code[256] = {0};
    for (size_t n = 0; n < 243; n++)
        is_code[(256 * n + 242) / 243] = 1;
    for (size_t value = 0; value < 256; value++) {
        uint8_t *copy = tiny_copy(good, size);
        copy[bytes + value] = (uint8_t)value;
        tiny_fix_checksums(copy, size);
        CHECK_EQ(file_status(copy, size, NULL), is_code[value] ? BN_OK : BN_ERR_CODE);
        free(copy);
    }
    file_forged_refused(good, size, bytes + 255, 1, 79, BN_ERR_CODE,
                        "layers.0.up.weight: a byte does not encode five ternary codes");
    file_forged_refused(good, size, up + 10, 1, BN_SCALE_GROUP, BN_ERR_TENSOR,
                        "layers.0.up.weight: encoding 5 with scale scope 3");
    free(good);
}

/* A file truncated or extended, with a header that agrees. */
static void test_own_size(const uint8_t *good, size_t size) {
    uint8_t *copy = tiny_alloc(size + 1);
    memcpy(copy, good, size);
    copy[size] = 0;
    tiny_put(copy + 16, size + 1, 8);
    file_refused(copy, size + 1, BN_ERR_SECTION, "expected a multiple of 64");
    tiny_put(copy + 16, 256, 8);
    tiny_put(copy + 24, 64, 4);
    file_refused(copy, 256, BN_ERR_SECTION, "64 sections need a table of 2048 bytes");
    free(copy);
}

static void test_foreign_names(void) {
    static const struct {
        const char *start, *says;
    } files[] = {{"GGUF\3", "a GGUF file"},
                 {"PK\3\4", "a zip archive"},
                 {"\x1f\x8b\x08", "a gzip archive"},
                 {"\x80\x04\x95", "a Python pickle"},
                 {"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"},
                 {"<!DOCTYPE html>", "HTML"},
                 {"{\"a\": 1}", "JSON"},
                 {"\x50\1\0\0\0\0\0\0{", NULL},
                 {"\x08\x0a\x12\x07pytorch", "an ONNX model"},
                 {"BITNET\n", "without its first byte"},
                 {"", "zeros"},
                 {"hello", "begins with 68 65 6c 6c 6f"}};
    uint8_t bytes[128];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        memset(bytes, 0, sizeof bytes);
        memcpy(bytes, files[i].start, strlen(files[i].start));
        file_refused(bytes, sizeof bytes, BN_ERR_MAGIC,
                     files[i].says ? files[i].says : "begins with 50");
    }
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, "\x50\1\0\0\0\0\0\0{", 9);
    file_refused(bytes, sizeof bytes, BN_ERR_MAGIC, "a safetensors file");
    for (size_t n = 1; n <= 2; n++) /* the beginning of an ONNX model, and no byte more */
        file_refused((const uint8_t *)"\x08\x0a", n, BN_ERR_MAGIC, "begins with 08");
}

/* --- sizes --- */

static void test_sizes(void) {
    uint64_t size;
    CHECK(bn_tensor_data_size(BN_TERNARY_2BIT, 17, 33, &size) && size == 64 * 2 * 3);
    CHECK(bn_tensor_data_size(BN_TERNARY_5TRIT, 17, 41, &size) && size == 64 * 2 * 3);
    CHECK(bn_tensor_data_size(BN_TERNARY_2BIT_ROWS, 17, 257, &size) && size == 64 * 17 * 2);
    CHECK(bn_tensor_data_size(BN_TERNARY_2BIT_COLUMNS, 257, 17, &size) && size == 64 * 17 * 2);
    CHECK(bn_tensor_data_size(BN_INT8_ROWS, 17, 65, &size) && size == 64 * 17 * 2);
    CHECK(bn_tensor_data_size(BN_INT8_SKETCH, 17, 65, &size) &&
          size == 64 * (17 * 2 + 2 * 5 + 2 * 2));
    CHECK(bn_tensor_data_size(BN_F32, 3, 5, &size) && size == 60);
    CHECK(bn_tensor_data_size(BN_F16, 3, 5, &size) && size == 30);
    CHECK(bn_tensor_scale_size(BN_SCALE_GROUP, 17, 129, &size) && size == 2 * 2 * 16 * 2);
    CHECK(bn_tensor_scale_size(BN_SCALE_ROW, 3, 129, &size) && size == 12);
    CHECK(bn_tensor_scale_size(BN_SCALE_NONE, 3, 129, &size) && size == 0);
    const uint64_t big[] = {UINT64_MAX, UINT64_MAX - 14, UINT64_MAX / 2, (uint64_t)1 << 62};
    for (size_t i = 0; i < 4; i++) {
        CHECK(!bn_tensor_data_size(BN_F32, big[i], 4, &size));
        CHECK(!bn_tensor_data_size(BN_F16, big[i], big[3 - i], &size));
        CHECK(!bn_tensor_data_size(BN_TERNARY_2BIT, big[i], big[i], &size));
        CHECK(!bn_tensor_data_size(BN_INT8_ROWS, 128, big[i], &size));
        CHECK(!bn_tensor_data_size(BN_INT8_SKETCH, big[i], 64, &size));
        CHECK(!bn_tensor_scale_size(BN_SCALE_ROW, big[i], 1, &size));
        CHECK(!bn_tensor_scale_size(BN_SCALE_GROUP, big[i], (uint64_t)1 << 20, &size));
    }
    for (uint32_t encoding = 0; encoding < 16; encoding++)
        CHECK_EQ(bn_tensor_data_size(encoding, 1, 1, &size),
                 encoding == 1 || encoding == 2 || (encoding >= 4 && encoding <= 9));
    CHECK(!bn_tensor_scale_size(4, 1, 1, &size));
}

int main(void) {
    size_t size;
    bn_kernels_scalar(&kernels);
    CHECK_EQ(kernels.bytes.crc32(0, (const uint8_t *)"123456789", 9), 0xCBF43926);
    uint8_t *good = tiny_file(tiny_decoder, SIZE_MAX, SIZE_MAX, &size);
    test_sizes();
    test_views(good, size);
    test_everything();
    test_sections(good, size);
    test_frequencies();
    test_foreign();
    test_trits();
    test_own_size(good, size);
    test_foreign_names();
    test_statuses(good, size);
    free(good);
    return 0;
}
