/* SPDX-License-Identifier: MIT
 *
 * failing.h: makes system calls of the engine fail. The linker (--wrap, see CMakeLists.txt) inserts
 * the functions below between the program and the C library. Include it in one file of a program,
 * after _GNU_SOURCE is defined.
 */
#ifndef BITNET_FAILING_H
#define BITNET_FAILING_H

#include "bitnet_runtime.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static long calls_until_failure = -1; /* -1: no call fails */
static bn_status injected;            /* the status expected for the failed call */
static int trickle;                   /* read returns a few bytes, or EINTR */
static long reads_until_end = -1;     /* then read finds the end of the file; -1: never early */
static atomic_long held;              /* memory blocks, mappings, descriptors and threads in use */

static int fails(bn_status status) {
    if (calls_until_failure < 0 || calls_until_failure-- > 0)
        return 0;
    injected = status;
    return 1;
}

static void *hold(void *p) {
    held += p != NULL;
    return p;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void **p, size_t alignment, size_t size);
void __real_free(void *p);
void *__real_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *at, size_t size);
int __real_open(const char *path, int flags, ...);
int __real_close(int fd);
int __real_fstat(int fd, struct stat *st);
ssize_t __real_read(int fd, void *bytes, size_t size);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);
int __real_pthread_join(pthread_t thread, void **result);

void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
int __wrap_posix_memalign(void **p, size_t alignment, size_t size);
void __wrap_free(void *p);
void *__wrap_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *at, size_t size);
int __wrap_open(const char *path, int flags, ...);
int __wrap_close(int fd);
int __wrap_fstat(int fd, struct stat *st);
ssize_t __wrap_read(int fd, void *bytes, size_t size);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);
int __wrap_pthread_join(pthread_t thread, void **result);

void *__wrap_malloc(size_t size) {
    return fails(BN_ERR_MEMORY) ? NULL : hold(__real_malloc(size));
}

void *__wrap_calloc(size_t n, size_t size) {
    return fails(BN_ERR_MEMORY) ? NULL : hold(__real_calloc(n, size));
}

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return fails(BN_ERR_MEMORY) ? NULL : hold(__real_aligned_alloc(alignment, size));
}

int __wrap_posix_memalign(void **p, size_t alignment, size_t size) {
    const int error = fails(BN_ERR_MEMORY) ? ENOMEM : __real_posix_memalign(p, alignment, size);
    held += error == 0;
    return error;
}

void __wrap_free(void *p) {
    held -= p != NULL;
    __real_free(p);
}

void *__wrap_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    void *p = MAP_FAILED;
    errno = ENODEV;
    if (!fails(fd < 0 ? BN_ERR_MEMORY : BN_ERR_IO))
        p = __real_mmap(at, size, protection, flags, fd, offset);
    held += p != MAP_FAILED;
    return p;
}

int __wrap_munmap(void *at, size_t size) {
    held--;
    return __real_munmap(at, size);
}

int __wrap_open(const char *path, int flags, ...) {
    errno = EMFILE;
    const int fd = fails(BN_ERR_IO) ? -1 : __real_open(path, flags);
    held += fd >= 0;
    return fd;
}

int __wrap_close(int fd) {
    held--;
    return __real_close(fd);
}

int __wrap_fstat(int fd, struct stat *st) {
    errno = EIO;
    return fails(BN_ERR_IO) ? -1 : __real_fstat(fd, st);
}

ssize_t __wrap_read(int fd, void *bytes, size_t size) {
    errno = EIO;
    if (reads_until_end >= 0 && reads_until_end-- == 0)
        return 0;
    if (fails(BN_ERR_IO))
        return -1;
    if (!trickle)
        return __real_read(fd, bytes, size);
    errno = EINTR;
    return trickle++ % 2 ? -1 : __real_read(fd, bytes, size < 1000 ? size : 1000);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument) {
    const int error =
        fails(BN_ERR_THREAD) ? EAGAIN : __real_pthread_create(thread, attributes, start, argument);
    held += error == 0;
    return error;
}

int __wrap_pthread_join(pthread_t thread, void **result) {
    held--;
    return __real_pthread_join(thread, result);
}

#endif
