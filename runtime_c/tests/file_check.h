/* SPDX-License-Identifier: MIT
 *
 * file_check.h: run the reader on bytes, and check the status and the explanation. Include it after
 * _POSIX_C_SOURCE is defined.
 */
#ifndef BITNET_FILE_CHECK_H
#define BITNET_FILE_CHECK_H

#include "check.h"
#include "file/file.h"
#include "tiny_file.h"

/* Parse and verify a copy in memory of exactly this size, with the scalar kernels. */
static inline bn_status file_status(const uint8_t *bytes, size_t size, char *detail) {
    uint8_t *copy = tiny_copy(bytes, size);
    bn_kernels kernels;
    bn_file file;
    bn_kernels_scalar(&kernels);
    bn_status status = bn_file_parse(copy, size, &kernels, &file, detail);
    if (status == BN_OK)
        status = bn_file_verify(&file, &kernels, NULL, detail);
    bn_file_close(&file);
    free(copy);
    return status;
}

/* A copy with the n bytes at `offset` set to `value` and all checksums updated. */
static inline uint8_t *file_forge(const uint8_t *good, size_t size, size_t offset, size_t n,
                                  uint64_t value) {
    uint8_t *copy = tiny_copy(good, size);
    tiny_put(copy + offset, value, n);
    tiny_fix_checksums(copy, size);
    return copy;
}

/* Check that the bytes are refused, with an explanation that contains `text`. */
static inline void file_refused(const uint8_t *bytes, size_t size, bn_status expected,
                                const char *text) {
    char detail[BN_DETAIL_SIZE] = "";
    const bn_status status = file_status(bytes, size, detail);
    CHECK_MSG(status == expected, "%s: status %d (%s), expected %d", text, status, detail,
              expected);
    CHECK_MSG(strstr(detail, text) != NULL, "found \"%s\", expected it to say \"%s\"", detail,
              text);
    CHECK_EQ(file_status(bytes, size, NULL), expected);
}

static inline void file_forged_refused(const uint8_t *good, size_t size, size_t offset, size_t n,
                                       uint64_t value, bn_status expected, const char *text) {
    uint8_t *forged = file_forge(good, size, offset, n, value);
    file_refused(forged, size, expected, text);
    free(forged);
}

#endif
