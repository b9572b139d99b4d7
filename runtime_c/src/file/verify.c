/* SPDX-License-Identifier: MIT
 *
 * verify.c: one pass over DATA that checks every byte (export/FORMAT.md §4, §6).
 *
 * Each thread has a share of DATA. A block is added to the checksum and then checked for invalid
 * values while it is in the cache; at the end the checksums are combined.
 */
#include "file.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/elementary.h"

enum { BLOCK = 128 * 1024 }; /* bytes; a multiple of a tile, well within the L2 cache */

static int has_nonzero(const uint8_t *p, size_t n) {
    return !bn_all_zero(p, n);
}

static const bn_rule padding = {has_nonzero, BN_ERR_TENSOR, "the padding before it is not zero"};

/* --- combining checksums --- */

/* a·b modulo the CRC-32 polynomial; as in the checksum, bit 31 stands for x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = (uint32_t)1 << 31; bit != 0; bit >>= 1) {
        product ^= a & bit ? b : 0;
        b = b >> 1 ^ (b & 1 ? 0xEDB88320u : 0);
    }
    return product;
}

/* The checksum of A followed by B, from theirs: crc(A)·x^(8·bytes of B) + crc(B). */
static uint32_t join(uint32_t a, uint32_t b, uint64_t bytes_of_b) {
    uint32_t power = (uint32_t)1 << 23; /* x^8 */
    for (; bytes_of_b > 0; bytes_of_b >>= 1) {
        a = bytes_of_b & 1 ? multiply(a, power) : a;
        power = multiply(power, power);
    }
    return a ^ b;
}

/* --- the pass --- */

/* A thread's share of DATA: from `begin` to `end`, processed up to `at`. The first broken rule is
 * kept until all checksums are known, because corruption is the better explanation. */
typedef struct data_part {
    uint64_t begin, at, end;
    uint32_t crc;
    const bn_rule *broken; /* NULL: none */
    size_t tensor;         /* the tensor that broke it */
} data_part;

typedef struct data_pass {
    const bn_file *file;
    const bn_kernels *kernels;
    int32_t n_parts; /* one for each thread */
    data_part parts[BN_MOST_THREADS];
} data_pass;

/* Advance to `end`, where the bytes that `rule` applies to end, or to the end of the part. */
static void go_on(const data_pass *pass, data_part *part, uint64_t end, const bn_rule *rule,
                  size_t tensor) {
    end = bn_min(end, part->end);
    while (part->at < end) {
        const size_t n = bn_min(end - part->at, BLOCK);
        const uint8_t *block = pass->file->data + part->at;
        part->crc = pass->kernels->bytes.crc32(part->crc, block, n);
        if (part->broken == NULL && rule->broken != NULL && rule->broken(block, n)) {
            part->broken = rule;
            part->tensor = tensor;
        }
        part->at += n;
    }
}

static void pass_part(data_pass *pass, int32_t index) {
    const bn_file *file = pass->file;
    data_part part = {0};
    size_t first, last;
    bn_share(bn_div_up(file->data_size, BN_ALIGN), index, pass->n_parts, &first, &last);
    part.begin = part.at = (uint64_t)first * BN_ALIGN;
    part.end = bn_min(last * BN_ALIGN, file->data_size);
    for (size_t i = 0; i < file->n_tensors; i++) { /* the table is in the order of DATA */
        const bn_record r = file->tensors[i];
        const bn_encoding *encoding = bn_encoding_of(r.encoding); /* which bn_file_parse checked */
        uint64_t size, end = r.offset;
        go_on(pass, &part, r.offset, &padding, i);
        for (size_t n = 0; n < BN_PARTS && encoding->parts[n].size; n++) {
            encoding->parts[n].size(r.rows, r.cols, &size);
            go_on(pass, &part, end += size, &encoding->parts[n].rule, i);
        }
        if (r.scale_size > 0) {
            go_on(pass, &part, r.scale_offset, &padding, i);
            go_on(pass, &part, r.scale_offset + r.scale_size, &bn_scales_of(r.scale_scope)->rule,
                  i);
        }
    }
    pass->parts[index] = part;
}

static void pass_parts(void *context, int32_t thread, size_t first, size_t end) {
    (void)thread;
    for (size_t i = first; i < end; i++)
        pass_part(context, (int32_t)i);
}

/* --- checks across values --- */

/* RoPE angles must stay in the range of bn_sincos up to the last position. */
static bn_status check_frequencies(const bn_file *file, const bn_record *r, char *detail) {
    const uint32_t last =
        file->stacks[r->stack].max_context - 1 + file->stacks[r->stack].first_position;
    for (uint32_t i = 0; i < r->cols; i++) {
        float frequency;
        memcpy(&frequency, file->data + r->offset + i * sizeof frequency, sizeof frequency);
        const float angle = (float)last * frequency;
        if (!(fabsf(angle) < BN_MOST_ANGLE)) {
            char name[BN_NAME_SIZE];
            bn_record_name(r, name);
            return bn_fail(detail, BN_ERR_SCALE,
                           "%s: frequency %" PRIu32 " is %g, which at position %" PRIu32
                           " makes an angle of %g, expected below %g",
                           name, i, (double)frequency, last, (double)angle, (double)BN_MOST_ANGLE);
        }
    }
    return BN_OK;
}

static bn_status check_derived(const bn_file *file, const bn_record *r, const bn_kernels *kernels,
                               bn_pool *pool, char *detail) {
    const bn_encoding *encoding = bn_encoding_of(r->encoding);
    if (encoding->wrong_row == NULL)
        return BN_OK;
    const size_t row = encoding->wrong_row(file->data + r->offset, r->rows, r->cols, kernels, pool);
    char name[BN_NAME_SIZE];
    if (row == r->rows)
        return BN_OK;
    bn_record_name(r, name);
    return bn_fail(detail, BN_ERR_CODE, "%s: the %s of row %zu is not that of its codes", name,
                   encoding->derived, row);
}

static bn_status check_wholes(const bn_file *file, const bn_kernels *kernels, bn_pool *pool,
                              char *detail) {
    bn_status status = BN_OK;
    for (size_t i = 0; i < file->n_tensors && status == BN_OK; i++) {
        const bn_record *r = &file->tensors[i];
        if (r->role == BN_ROPE_FREQUENCIES || r->role == BN_ROPE_LOCAL_FREQUENCIES)
            status = check_frequencies(file, r, detail);
        else
            status = check_derived(file, r, kernels, pool, detail);
    }
    return status;
}

bn_status bn_file_verify(const bn_file *file, const bn_kernels *kernels, bn_pool *pool,
                         char *detail) {
    const int32_t n_parts = pool != NULL ? bn_pool_threads(pool) : 1;
    data_pass pass = {.file = file, .kernels = kernels, .n_parts = n_parts};
    if (pool != NULL)
        bn_pool_run(pool, (size_t)n_parts, 1, pass_parts, &pass);
    else
        pass_part(&pass, 0);

    uint32_t crc = 0;
    const data_part *first = NULL; /* first part with a broken rule */
    for (const data_part *part = pass.parts; part < pass.parts + n_parts; part++) {
        crc = join(crc, part->crc, part->end - part->begin);
        if (first == NULL && part->broken != NULL)
            first = part;
    }
    if (crc != file->weights.data_crc)
        return bn_fail(detail, BN_ERR_CHECKSUM,
                       "section DATA has checksum %08" PRIx32 ", expected %08" PRIx32, crc,
                       file->weights.data_crc);
    if (first != NULL) {
        const bn_record r = file->tensors[first->tensor];
        char name[BN_NAME_SIZE];
        bn_record_name(&r, name);
        return bn_fail(detail, first->broken->status, "%s: %s", name, first->broken->text);
    }
    return check_wholes(file, kernels, pool, detail);
}
