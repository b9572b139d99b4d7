/* SPDX-License-Identifier: MIT
 *
 * file_verify.c: one pass over DATA that looks at every byte (export/FORMAT.md §4, §6).
 *
 * The checksum runs over DATA from end to end; each block is looked at for refused values right
 * after it went through the checksum, while it is in the cache.
 */
#include "file.h"

#include <inttypes.h>
#include <string.h>

enum { BLOCK = 128 * 1024 }; /* bytes; a multiple of a tile, well inside a second-level cache */

static uint64_t word(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* Whether a 2-bit field is 3. n is a multiple of 64. */
static int has_ternary_3(const uint8_t *p, size_t n) {
    uint64_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        const uint64_t w = word(p + i);
        bad |= w & w >> 1;
    }
    return (bad & 0x5555555555555555u) != 0;
}

/* Whether a byte is none of the 243 that stand for five codes: it is ceil(256 n / 243) exactly when
 * 243·byte = 256 n + r with r < 243. */
static int has_no_trits(const uint8_t *p, size_t n) {
    uint8_t bad = 0;
    for (size_t i = 0; i < n; i++)
        bad |= (uint8_t)(243u * p[i]) >= 243u;
    return bad != 0;
}

/* Whether a half byte is zero in both planes. n is a multiple of 64. */
static int has_int8_zero(const uint8_t *high, const uint8_t *low, size_t n) {
    uint64_t good = ~(uint64_t)0;
    for (size_t i = 0; i < n; i += sizeof good) {
        const uint64_t u = word(high + i) | word(low + i);
        const uint64_t pairs = u | u >> 1;
        good &= pairs | pairs >> 2;
    }
    return (~good & 0x1111111111111111u) != 0;
}

/* Whether a scale is not finite, normal and > 0. As integers: below the smallest normal float,
 * or at infinity and above, where NaN and all negative numbers lie too. */
static int has_bad_scale(const uint8_t *p, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        uint32_t bits;
        memcpy(&bits, p + i, sizeof bits);
        bad |= bits - 0x00800000u >= 0x7F800000u - 0x00800000u;
    }
    return bad != 0;
}

/* Whether a float has all bits of its exponent set. */
static int has_not_finite_f32(const uint8_t *p, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        uint32_t bits;
        memcpy(&bits, p + i, sizeof bits);
        bad |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    return bad != 0;
}

static int has_not_finite_f16(const uint8_t *p, size_t n) {
    uint16_t bad = 0;
    for (size_t i = 0; i < n; i += sizeof bad) {
        uint16_t bits;
        memcpy(&bits, p + i, sizeof bits);
        bad |= (bits & 0x7C00u) == 0x7C00u;
    }
    return bad != 0;
}

/* The pass: `end` is how far the checksum has come; `status` keeps the first refused value until
 * the checksum is known, because damaged bytes are the better explanation. */
typedef struct bn_pass {
    const bn_file *file;
    const bn_kernels *kernels;
    char *detail;
    uint64_t end;
    uint32_t crc;
    bn_status status;
} bn_pass;

static void refuse(bn_pass *p, bn_status status, const bn_record *r, const char *what) {
    char name[BN_NAME_SIZE];
    if (p->status != BN_OK)
        return;
    bn_record_name(r, name);
    p->status = bn_fail(p->detail, status, "%s: %s", name, what);
}

static void advance(bn_pass *p, uint64_t end) {
    p->crc = p->kernels->crc32(p->crc, p->file->data + p->end, (size_t)(end - p->end));
    p->end = end;
}

/* Up to the next thing in DATA, which begins at `offset`. */
static void pass_padding(bn_pass *p, const bn_record *r, uint64_t offset) {
    if (!bn_all_zero(p->file->data + p->end, (size_t)(offset - p->end)))
        refuse(p, BN_ERR_TENSOR, r, "the padding before it is not zero");
    advance(p, offset);
}

/* The next block of what ends at `end`, after it went into the checksum; NULL when none is left. */
static const uint8_t *next_block(bn_pass *p, uint64_t end, size_t *n) {
    const uint8_t *block = p->file->data + p->end;
    const uint64_t left = end - p->end;
    *n = left < BLOCK ? (size_t)left : BLOCK;
    advance(p, p->end + *n);
    return *n > 0 ? block : NULL;
}

static void pass_weights(bn_pass *p, const bn_record *r) {
    const uint64_t end = r->offset + r->size, plane = r->size / 2;
    const uint8_t *block;
    size_t n;
    if (r->encoding == BN_INT8_PLANES) /* a code is seen where its low half lies */
        advance(p, r->offset + plane);
    while ((block = next_block(p, end, &n)) != NULL) {
        if (r->encoding == BN_TERNARY_2BIT && has_ternary_3(block, n))
            refuse(p, BN_ERR_CODE, r, "a ternary code is 3, expected 0, 1 or 2");
        if (r->encoding == BN_TERNARY_5TRIT && has_no_trits(block, n))
            refuse(p, BN_ERR_CODE, r, "a byte stands for no five ternary codes");
        if (r->encoding == BN_INT8_PLANES && has_int8_zero(block - plane, block, n))
            refuse(p, BN_ERR_CODE, r, "an int8 code is -128, expected -127 to 127");
        if ((r->encoding == BN_F32 && has_not_finite_f32(block, n)) ||
            (r->encoding == BN_F16 && has_not_finite_f16(block, n)))
            refuse(p, BN_ERR_SCALE, r, "a value is not finite");
    }
}

static void pass_scales(bn_pass *p, const bn_record *r) {
    pass_padding(p, r, r->scale_offset);
    if (has_bad_scale(p->file->data + r->scale_offset, (size_t)r->scale_size))
        refuse(p, BN_ERR_SCALE, r, "a scale is not finite, normal and > 0");
    advance(p, r->scale_offset + r->scale_size);
}

bn_status bn_file_verify(const bn_file *file, const bn_kernels *kernels, char *detail) {
    bn_pass pass = {.file = file, .kernels = kernels, .detail = detail, .status = BN_OK};
    for (size_t i = 0; i < file->n_tensors; i++) { /* the order of the table is that of DATA */
        const bn_record r = bn_file_record(file, i);
        pass_padding(&pass, &r, r.offset);
        pass_weights(&pass, &r);
        if (r.scale_size > 0)
            pass_scales(&pass, &r);
    }
    if (pass.crc != file->data_crc)
        return bn_fail(detail, BN_ERR_CHECKSUM,
                       "section DATA has checksum %08" PRIx32 ", expected %08" PRIx32, pass.crc,
                       file->data_crc);
    return pass.status;
}
