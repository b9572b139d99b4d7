/* SPDX-License-Identifier: MIT
 *
 * bytes.c: see bytes.h.
 */
#include "scalar.h"

static uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) /* NaN: quieted, keeps the upper bits of its payload */
        return (uint16_t)(sign | 0x7E00u | (bits >> 13 & 0x3FFu));
    if (bits > 0x477FE000u) /* above 65504 */
        return (uint16_t)(sign | 0x7BFFu);
    if (bits < 0x38800000u) { /* below 2^-14: a multiple of 2^-24, rounded by adding 0.5 */
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f; /* ulp of [0.5, 1) is 2^-24 */
        memcpy(&bits, &magnitude, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3F000000u));
    }
    bits += 0xFFFu + (bits >> 13 & 1u); /* round half to even */
    return (uint16_t)(sign | (bits - 0x38000000u) >> 13);
}

static void f32_to_f16(uint16_t *y, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        y[i] = float_to_half(x[i]);
}

static void f16_to_f32(float *y, const uint16_t *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        y[i] = half_to_float(x[i]);
}

uint32_t bn_crc32_bytes(uint32_t crc, const uint8_t *p, size_t n) {
    /* entry i is i shifted out of the polynomial 0xEDB88320 */
    static const uint32_t table[16] = {0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC,
                                       0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
                                       0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C,
                                       0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C};
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return crc;
}

static uint32_t crc32(uint32_t crc, const uint8_t *p, size_t n) {
    return ~bn_crc32_bytes(~crc, p, n);
}

const bn_byte_kernels bn_scalar_bytes = {
    .f32_to_f16 = f32_to_f16,
    .f16_to_f32 = f16_to_f32,
    .crc32 = crc32,
};
