/* SPDX-License-Identifier: MIT
 *
 * test_sizes.c: sessions as large as a file may require: they get all their memory, or
 * BN_ERR_MEMORY; sizes never overflow.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "session/session.h"
#include "system/pages.h"

#include "session_model.h"

enum { MOST_CONTEXT = 1 << 24, WIDE = 1024, BATCH = 4096 };

/* The longest context and the widest heads that the format allows; a terabyte of keys. */
static void long_context(tiny_writer *w) {
    const uint32_t one = tiny_float_bits(1);
    uint32_t words[48] = {[2] = 3, [3] = 8, [4] = 1, [5] = 8, [6] = 8, [7] = WIDE, [8] = 8};
    words[9] = MOST_CONTEXT;
    words[12] = 1 | TINY_FINAL_NORM;
    words[21] = words[28] = 1;
    words[13] = words[19] = words[22] = words[23] = words[24] = one;
    words[18] = 3;
    tiny_stack(w, words, "long_context");
    tiny_tensor(w, 0, 1, TINY_NONE, 0, 1, 0, 1, 8);
    for (unsigned role = 2; role <= 4; role++)
        tiny_tensor(w, 0, role, TINY_NONE, 0, 4, 1, 8 * WIDE, 8);
    tiny_tensor(w, 0, 8, TINY_NONE, 0, 4, 1, 8, 8 * WIDE);
    tiny_tensor(w, 0, 10, TINY_NONE, 0, 1, 0, 1, 8);
    for (unsigned role = 12; role <= 13; role++)
        tiny_tensor(w, 0, role, TINY_NONE, 0, 4, 1, 8, 8);
    tiny_tensor(w, 0, 15, TINY_NONE, 0, 4, 1, 8, 8);
    tiny_tensor(w, TINY_NONE, 64, TINY_NONE, 0, 6, 2, 3, 8);
    tiny_tensor(w, TINY_NONE, 66, TINY_NONE, 0, 1, 0, 1, 8);
}

int main(void) {
    size_t size;
    uint8_t *file = tiny_file(long_context, SIZE_MAX, SIZE_MAX, &size);
    const bn_load_options options = {.threads = 1};
    bn_model *model;
    bn_model_info info;
    char detail[BN_DETAIL_SIZE] = "";
    CHECK_MSG(bn_model_open_bytes(file, size, &options, &model, detail) == BN_OK, "%s", detail);
    ok(bn_model_get_info(model, &info));
    CHECK_EQ(info.max_context, MOST_CONTEXT);
    for (int32_t type = 0; type < BN_KV_TYPES; type++) {
        const bn_session_options o = {.n_ctx = MOST_CONTEXT, .kv_type = type, .batch = BATCH};
        const uint64_t bytes = MOST_CONTEXT * info.kv_bytes_per_token[type];
        bn_session *s = NULL;
        CHECK(bytes >= (uint64_t)1 << 37);
        if (SANITIZED) /* sanitizers touch shadow memory for each byte */
            continue;
        const bn_status status = bn_session_new(model, &o, &s);
        CHECK(status == BN_ERR_MEMORY || (status == BN_OK && bn_session_bytes(s) > bytes));
        CHECK((s == NULL) == (status != BN_OK));
        bn_session_free(s);
    }
    const bn_session_options refused[] = {
        {.n_ctx = MOST_CONTEXT + 1}, {.n_ctx = INT32_MAX}, {.n_ctx = -1},
        {.batch = BATCH + 1},        {.batch = INT32_MAX}, {.batch = INT32_MIN},
        {.kv_type = BN_KV_TYPES},    {.kv_type = -1}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        bn_session *s = NULL;
        CHECK_EQ(bn_session_new(model, &refused[i], &s), BN_ERR_ARGUMENT);
        CHECK(s == NULL);
    }
    double rate; /* more parts of the buffer than a run of threads can count */
    const uint64_t too_large[] = {(uint64_t)1 << 40, UINT64_MAX - BN_HUGE_PAGE, UINT64_MAX};
    for (size_t i = 0; i < sizeof too_large / sizeof *too_large; i++)
        CHECK_EQ(bn_measure_read_bandwidth(1, too_large[i], &rate), BN_ERR_ARGUMENT);
    bn_model_close(model);
    free(file);
    return 0;
}
