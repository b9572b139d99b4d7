/* SPDX-License-Identifier: MIT
 *
 * bytes.h: conversions between float and half, and checksums.
 */
#ifndef BITNET_KERNELS_BYTES_H
#define BITNET_KERNELS_BYTES_H

#include <stddef.h>
#include <stdint.h>

typedef struct bn_byte_kernels {
    /* IEEE half and back. Narrowing rounds half to even and saturates at ±65504 (so that a
     * cache entry is never infinite); NaN stays NaN. */
    void (*f32_to_f16)(uint16_t *y, const float *x, size_t n);
    void (*f16_to_f32)(float *y, const uint16_t *x, size_t n);

    /* zlib's crc32(crc, p, n): start with 0; pass the result back in to continue. */
    uint32_t (*crc32)(uint32_t crc, const uint8_t *p, size_t n);
} bn_byte_kernels;

/* crc32 without the inversions at its beginning and end, half a byte at a time: for what a tier's
 * own leaves over. */
uint32_t bn_crc32_bytes(uint32_t crc, const uint8_t *p, size_t n);

#endif
