/* SPDX-License-Identifier: MIT
 *
 * test_adapters.c: an adapter alone is refused if it is not for the model, also if a forged file
 * says that it is.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, mkstemp */

#include <unistd.h>

#include "mask_model.h"

static char path[] = "/tmp/bitnet_adapters_XXXXXX";

enum { BASE = 28, CONTEXT = 4 * 9 }; /* in the header, and in a record of STACKS */

/* Open the model with an adapter file of which one byte has another value. */
static bn_status open_with(const uint8_t *adapter, size_t size, size_t at, int flip) {
    const char *const adapters[] = {path};
    const bn_load_options options = {.threads = 1, .n_adapters = 1, .adapters = adapters};
    uint8_t *bytes = tiny_copy(adapter, size);
    bn_model *with;
    bytes[at] ^= (uint8_t)flip;
    tiny_fix_checksums(bytes, size);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, size, f) == size && fclose(f) == 0);
    const bn_status status = bn_model_open_bytes(file, file_size, &options, &with, NULL);
    if (!status)
        bn_model_close(with);
    free(bytes);
    return status;
}

static void test_refusals(void) {
    size_t size;
    kind.draft = 1;
    begin(BN_MASK_CAUSAL, 0, 0);
    kind.rank = 3;
    uint8_t *adapter = tiny_adapter(recipe, file, 1, &size);
    const size_t stacks = tiny_section(adapter, 1);
    CHECK_EQ(open_with(adapter, size, 0, 0), BN_OK);
    for (size_t i = 0; i < 20; i++) /* size and checksums of the model's weights */
        CHECK_EQ(open_with(adapter, size, BASE + i, 1), BN_ERR_MODEL);
    for (size_t i = 20; i < 32; i++) /* reserved */
        CHECK_EQ(open_with(adapter, size, BASE + i, 1), BN_ERR_VERSION);
    CHECK_EQ(open_with(adapter, size, stacks + CONTEXT, 4), BN_ERR_MODEL);
    CHECK_EQ(open_with(adapter, size, stacks + 256 + CONTEXT, 4), BN_ERR_MODEL);
    free(adapter);
    end();
}

int main(void) {
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && close(fd) == 0);
    test_refusals();
    CHECK_EQ(unlink(path), 0);
    return 0;
}
