/* SPDX-License-Identifier: MIT
 *
 * test_changing.c: a mapped file that another process writes to. It cannot undo a check: what was
 * checked is a copy, and only values can change.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "file_check.h"
#include "session_model.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TRIES = 1500 };

/* Erasing all tables after the file was parsed has no effect. */
static void test_tables(void) {
    size_t size;
    uint8_t *bytes = tiny_file(tiny_everything, SIZE_MAX, SIZE_MAX, &size);
    char detail[BN_DETAIL_SIZE] = "";
    bn_kernels kernels;
    bn_file f;
    bn_kernels_scalar(&kernels);
    CHECK_EQ(bn_file_parse(bytes, size, &kernels, &f, NULL), BN_OK);
    const bn_tensor before = bn_file_tensor(&f, 0, 1, BN_Q, BN_NO_EXPERT);
    memset(bytes, 0xFF, tiny_section(bytes, BN_SECTION_METADATA));
    CHECK_MSG(bn_file_verify(&f, &kernels, NULL, detail) == BN_OK, "%s", detail);
    const bn_tensor after = bn_file_tensor(&f, 0, 1, BN_Q, BN_NO_EXPERT);
    CHECK(after.data == before.data && after.rows == before.rows && after.bias == before.bias);
    CHECK_EQ(f.n_stacks, 4);
    CHECK_EQ(f.stacks[1].dim, 8);
    bn_file_close(&f);
    free(bytes);
}

static void compute(bn_model *model) {
    const int32_t tokens[3] = {0, 1, 2};
    const uint8_t *section;
    bn_session *s;
    bn_model_info info;
    size_t size, sum = 0;
    int32_t token;
    ok(bn_model_get_info(model, &info));
    ok(bn_model_get_section(model, BN_SECTION_METADATA, &section, &size));
    for (size_t i = 0; i < size; i++)
        sum += section[i];
    CHECK(sum != 1); /* read */
    ok(bn_session_new(model, NULL, &s));
    const bn_status status = bn_session_append(s, tokens, 3, BN_LOGITS_LAST, NULL);
    CHECK(status == BN_OK || status == BN_ERR_NUMERIC);
    if (status == BN_OK)
        (void)bn_session_sample(s, NULL, &token);
    bn_session_free(s);
}

/* Corrupt and restore the tables' bytes, and some values, until the process is killed. */
static void disturb(volatile uint8_t *bytes, const uint8_t *good, size_t size, uint64_t random) {
    const size_t tables = tiny_section(good, BN_SECTION_DATA);
    for (;;) {
        const size_t at = check_below(&random, 8) ? check_below(&random, tables) & ~(size_t)3
                                                  : check_below(&random, size / 4) * 4;
        for (size_t i = 0; i < 4; i++)
            bytes[at + i] = (uint8_t)check_random(&random);
        for (size_t i = check_below(&random, 200); i > 0; i--)
            (void)bytes[at];
        for (size_t i = 0; i < 4; i++)
            bytes[at + i] = good[at + i];
    }
}

/* The file is shared memory between inaccessible pages. */
static void test_writer(int no_verify) {
    size_t size;
    uint8_t *good = tiny_file(tiny_decoder, SIZE_MAX, SIZE_MAX, &size);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (size + page - 1) / page * page;
    uint8_t *pages =
        mmap(NULL, room + 2 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    CHECK_EQ(mprotect(pages, page, PROT_NONE), 0);
    CHECK_EQ(mprotect(pages + page + room, page, PROT_NONE), 0);
    uint8_t *bytes = pages + page + room - size; /* its size is a multiple of 64 */
    memcpy(bytes, good, size);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);
        disturb(bytes, good, size, (uint64_t)no_verify);
        _exit(0);
    }
    int opened = 0, refused = 0;
    for (int i = 0; i < TRIES || (opened == 0 && i < 100 * TRIES); i++) {
        const bn_load_options options = {.threads = 1, .no_verify = no_verify};
        bn_model *model;
        char detail[BN_DETAIL_SIZE] = "";
        if (bn_model_open_bytes(bytes, size, &options, &model, detail) == BN_OK) {
            compute(model);
            bn_model_close(model);
            opened++;
        } else {
            CHECK(strlen(detail) > 5);
            refused++;
        }
    }
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    CHECK_MSG(opened > 0, "%d refused", refused);
    CHECK_EQ(munmap(pages, room + 2 * page), 0);
    free(good);
}

int main(void) {
    alarm(120);
    test_tables();
    test_writer(0);
    test_writer(1);
    return 0;
}
