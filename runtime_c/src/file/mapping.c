/* SPDX-License-Identifier: MIT
 *
 * mapping.c: the bytes of a file on disk, mapped or read.
 */
#define _GNU_SOURCE /* madvise */

#include "file.h"
#include "system/memory.h"
#include "system/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static bn_status fail_errno(char *detail, const char *call) {
    const int error = errno;
    return bn_fail(detail, error == ENOMEM ? BN_ERR_MEMORY : BN_ERR_IO, "%s: %s", call,
                   strerror(error));
}

static const char *file_kind(mode_t mode) {
    return S_ISDIR(mode)    ? "a directory"
           : S_ISFIFO(mode) ? "a FIFO"
           : S_ISCHR(mode)  ? "a character device"
           : S_ISBLK(mode)  ? "a block device"
           : S_ISSOCK(mode) ? "a socket"
                            : "not a file";
}

/* Checked before open as well as after: a socket cannot be opened, and opening a device may have
 * side effects. */
static bn_status check_regular(const struct stat *st, char *detail) {
    if (!S_ISREG(st->st_mode))
        return bn_fail(detail, BN_ERR_NOT_REGULAR, "this is %s, expected a regular file",
                       file_kind(st->st_mode));
    if (st->st_size <= 0)
        return bn_fail(detail, BN_ERR_TRUNCATED, "the file is empty, expected a packed file");
    if ((uint64_t)st->st_size > SIZE_MAX - BN_HUGE_PAGE)
        return bn_fail(detail, BN_ERR_MEMORY, "the file is larger than the address space");
    return BN_OK;
}

/* Called before any of it is read. */
static bn_status check_room(uint64_t bytes, bn_memory_use use, char *detail) {
    const bn_memory left = bn_memory_left("", use, bytes);
    if (left.bytes >= bytes)
        return BN_OK;
    return bn_fail(detail, BN_ERR_MEMORY, "the file has %.1f MB, expected at most %.1f MB: %s",
                   (double)bytes / 1e6, (double)left.bytes / 1e6, left.limit);
}

static bn_status map(int fd, bn_mapping *m, char *detail) {
    const bn_status status = check_room(m->size, BN_MEMORY_MAP, detail);
    if (status != BN_OK)
        return status;
    void *bytes = mmap(NULL, m->size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return fail_errno(detail, "mmap");
#if defined(MADV_HUGEPAGE) /* hints; a failure costs only time */
    (void)madvise(bytes, m->size, MADV_HUGEPAGE);
#endif
#if defined(MADV_WILLNEED)
    (void)madvise(bytes, m->size, MADV_WILLNEED);
#endif
    m->bytes = bytes;
    m->mapped = 1;
    return BN_OK;
}

/* Read bytes [done, end) of a file of `size` bytes. */
static bn_status read_part(int fd, uint8_t *bytes, size_t done, size_t end, size_t size,
                           char *detail) {
    while (done < end) {
        const ssize_t n = read(fd, bytes + done, end - done);
        if (n == 0)
            return bn_fail(detail, BN_ERR_TRUNCATED,
                           "the file shrank to %zu bytes while it was read, expected %zu", done,
                           size);
        if (n > 0)
            done += (size_t)n;
        else if (errno != EINTR)
            return fail_errno(detail, "read");
    }
    return BN_OK;
}

static bn_status read_into_memory(int fd, bn_mapping *m, char *detail) {
    uint8_t head[4096]; /* identify the file before allocating memory for all of it */
    const size_t begin = bn_min(m->size, sizeof head);
    bn_status status = read_part(fd, head, 0, begin, m->size, detail);
    if (status == BN_OK)
        status = bn_file_begins(head, begin, detail);
    size_t capacity = m->size;
    if (status == BN_OK)
        status = check_room(capacity, BN_MEMORY_OWN, detail);
    if (status != BN_OK)
        return status;
    void *bytes = bn_pages_new(&capacity);
    if (bytes == NULL)
        return bn_fail(detail, BN_ERR_MEMORY, "no memory for the file's %zu bytes", m->size);
    memcpy(bytes, head, begin);
    status = read_part(fd, bytes, begin, m->size, m->size, detail);
    if (status != BN_OK) {
        free(bytes);
        return status;
    }
    m->bytes = bytes;
    m->mapped = 0;
    return BN_OK;
}

static bn_status open_regular(const char *path, int *fd, struct stat *st, char *detail) {
    if (stat(path, st) != 0)
        return fail_errno(detail, "stat");
    bn_status status = check_regular(st, detail);
    if (status != BN_OK)
        return status;
    do /* O_NONBLOCK: if the file was just replaced by a FIFO, open would wait for a writer */
        *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    while (*fd < 0 && errno == EINTR);
    if (*fd < 0)
        return fail_errno(detail, "open");
    status = fstat(*fd, st) == 0 ? check_regular(st, detail) : fail_errno(detail, "fstat");
    if (status != BN_OK)
        (void)close(*fd);
    return status;
}

bn_status bn_mapping_open(const char *path, int no_mmap, bn_mapping *mapping, char *detail) {
    struct stat st;
    int fd = -1;
    bn_status status = open_regular(path, &fd, &st, detail);
    if (status != BN_OK)
        return status;
    bn_mapping m = {.size = (size_t)st.st_size};
    status = no_mmap ? read_into_memory(fd, &m, detail) : map(fd, &m, detail);
    (void)close(fd); /* a mapping outlives its descriptor */
    if (status == BN_OK)
        *mapping = m;
    return status;
}

void bn_mapping_close(bn_mapping *mapping) {
    /* Neither call can fail on a mapping from bn_mapping_open; the memory was never const. */
    if (mapping->mapped == 1)
        (void)munmap((void *)(uintptr_t)mapping->bytes, mapping->size);
    else if (mapping->mapped == 0)
        free((void *)(uintptr_t)mapping->bytes);
    *mapping = (bn_mapping){.mapped = -1};
}
