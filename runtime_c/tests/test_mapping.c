/* SPDX-License-Identifier: MIT
 *
 * test_mapping.c: regular files are mapped and read; everything else is refused immediately.
 */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "file/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char folder[] = "/tmp/bitnet_mapping_XXXXXX";

static const char *path_of(const char *name) {
    static char path[100]; /* short enough for a socket address */
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *path, const uint8_t *bytes, size_t size) {
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL);
    CHECK(size == 0 || fwrite(bytes, size, 1, f) == 1);
    CHECK(fclose(f) == 0);
}

#define MAGIC                                                                                      \
    "\x89"                                                                                         \
    "BITNET\n"

static int next_descriptor(void) {
    const int fd = open("/dev/null", O_RDONLY);
    close(fd);
    return fd;
}

/* Refused in both ways of opening, with an explanation, and nothing is left open. */
static void refused(const char *path, bn_status expected, const char *text) {
    for (int no_mmap = 0; no_mmap < 2; no_mmap++) {
        char detail[BN_DETAIL_SIZE] = "";
        bn_mapping m = {.size = 77};
        const int fd = next_descriptor();
        const bn_status status = bn_mapping_open(path, no_mmap, &m, detail);
        CHECK_MSG(status == expected, "%s: status %d (%s)", path, status, detail);
        CHECK_MSG(strstr(detail, text) != NULL, "found \"%s\", expected \"%s\"", detail, text);
        CHECK_EQ(bn_mapping_open(path, no_mmap, &m, NULL), expected);
        CHECK(m.size == 77 && m.bytes == NULL);
        CHECK_EQ(next_descriptor(), fd);
    }
}

static void test_contents(void) {
    const size_t sizes[] = {1, 64, 4095, 4096, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1};
    const char *path = path_of("file");
    uint64_t random = 3;
    uint8_t *bytes = malloc((2 << 20) + 1);
    CHECK(bytes != NULL);
    for (size_t i = 0; i <= 2 << 20; i++)
        bytes[i] = (uint8_t)check_random(&random);
    memcpy(bytes, MAGIC, sizeof MAGIC - 1);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        write_file(path, bytes, sizes[i]);
        for (int no_mmap = 0; no_mmap < 2; no_mmap++) {
            bn_mapping m;
            const int fd = next_descriptor();
            CHECK_EQ(bn_mapping_open(path, no_mmap, &m, NULL), BN_OK);
            CHECK_EQ(next_descriptor(), fd);
            CHECK_EQ(m.mapped, !no_mmap);
            CHECK_EQ(m.size, sizes[i]);
            CHECK_EQ((uintptr_t)m.bytes % 64, 0);
            CHECK(memcmp(m.bytes, bytes, sizes[i]) == 0);
            bn_mapping_close(&m);
            CHECK(m.bytes == NULL && m.mapped == -1);
            bn_mapping_close(&m); /* a second time: there is nothing left to close */
        }
    }
    CHECK_EQ(unlink(path), 0);
    free(bytes);
}

static void test_own_copy(void) {
    const char *path = path_of("file");
    bn_mapping m;
    write_file(path, (const uint8_t *)MAGIC "abcd", 12);
    CHECK_EQ(bn_mapping_open(path, 1, &m, NULL), BN_OK);
    write_file(path, (const uint8_t *)"x", 1);
    CHECK(memcmp(m.bytes, MAGIC "abcd", 12) == 0); /* unaffected by changes of the file */
    bn_mapping_close(&m);
    CHECK_EQ(unlink(path), 0);

    uint8_t outside[64] = {1};
    m = (bn_mapping){.bytes = outside, .size = 64, .mapped = -1};
    bn_mapping_close(&m); /* the caller's bytes are not freed */
    CHECK_EQ(outside[0], 1);
}

static void test_refused(void) {
    refused(path_of("nothing here"), BN_ERR_IO, "No such file");
    refused("", BN_ERR_IO, "No such file");
    refused(folder, BN_ERR_NOT_REGULAR, "a directory");
    refused("/dev/zero", BN_ERR_NOT_REGULAR, "a character device");

    const char *path = path_of("fifo");
    CHECK_EQ(mkfifo(path, 0600), 0);
    refused(path, BN_ERR_NOT_REGULAR, "a FIFO"); /* no writer: a blocking open would wait */
    CHECK_EQ(unlink(path), 0);

    path = path_of("socket");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path));
    const int s = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(s >= 0 && bind(s, (const struct sockaddr *)&address, sizeof address) == 0);
    refused(path, BN_ERR_NOT_REGULAR, "a socket");
    close(s);
    CHECK_EQ(unlink(path), 0);

    path = path_of("empty");
    write_file(path, NULL, 0);
    refused(path, BN_ERR_TRUNCATED, "empty");
    CHECK_EQ(unlink(path), 0);

    path = path_of("secret");
    write_file(path, (const uint8_t *)"x", 1);
    CHECK_EQ(chmod(path, 0), 0);
    if (access(path, R_OK) != 0) /* root may read everything */
        refused(path, BN_ERR_IO, "open: Permission denied");
    CHECK_EQ(unlink(path), 0);

    path = path_of("loop");
    CHECK_EQ(symlink("loop", path), 0);
    refused(path, BN_ERR_IO, strerror(ELOOP));
    CHECK_EQ(unlink(path), 0);
}

/* A terabyte that is not a packed file is refused before it is read or memory is allocated. */
static void test_foreign(void) {
    const char *path = path_of("foreign");
    char detail[BN_DETAIL_SIZE] = "";
    bn_mapping m;
    write_file(path, (const uint8_t *)"GGUF", 4);
    CHECK_EQ(truncate(path, (off_t)1 << 40), 0); /* sparse */
    CHECK_EQ(bn_mapping_open(path, 1, &m, detail), BN_ERR_MAGIC);
    CHECK(strstr(detail, "a GGUF file") != NULL);
    write_file(path, (const uint8_t *)"PK", 2);
    CHECK_EQ(bn_mapping_open(path, 1, &m, detail), BN_ERR_MAGIC);
    CHECK_EQ(unlink(path), 0);
}

int main(void) {
    alarm(60); /* a hang is a failure */
    CHECK(mkdtemp(folder) != NULL);
    test_contents();
    test_own_copy();
    test_foreign();
    test_refused();
    CHECK_EQ(rmdir(folder), 0);
    return 0;
}
