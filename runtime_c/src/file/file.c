/* SPDX-License-Identifier: MIT
 *
 * file.c: header and section table of a packed file (export/FORMAT.md §1).
 *
 * Every byte is hostile until it is checked, and may change afterwards, because another process may
 * write to a mapped file: so tables are copied, and the copy is checked and used. No loop is longer
 * than the file's contents, and each kind of failure has its own status.
 */
#include "file.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packed file is little-endian and is read in place"
#endif

enum {
    MIN_SECTIONS = 3,
    MAX_SECTIONS = 64,
    SECTION_OPTIONAL = 1, /* flag */
    MAX_TEMPLATE = 256 * 1024
};

typedef struct bn_header {
    uint8_t magic[8];
    uint32_t version, flags;
    uint64_t file_size;
    uint32_t section_count;
    uint8_t base[sizeof(bn_weights)];
    uint32_t header_crc;
} bn_header;

typedef struct bn_section_entry {
    uint32_t kind, crc;
    uint64_t offset, size;
    uint32_t flags, reserved;
} bn_section_entry;

/* Header and section table as laid out in the file. */
typedef struct bn_opening {
    bn_header header;
    bn_section_entry sections[MAX_SECTIONS]; /* [header.section_count] */
} bn_opening;

_Static_assert(sizeof(bn_header) == 64, "the header has 64 bytes");
_Static_assert(sizeof(bn_section_entry) == 32, "an entry has 32 bytes");

static bn_status read_head(const uint8_t *bytes, size_t size, const bn_kernels *kernels,
                           bn_opening *opening, char *detail) {
    bn_header *header = &opening->header;
    const bn_status status = bn_file_begins(bytes, size, detail);
    if (status != BN_OK)
        return status;
    if (size < sizeof *header)
        return bn_fail(detail, BN_ERR_TRUNCATED, "the file has %zu bytes, a header has %zu", size,
                       sizeof *header);
    memcpy(header, bytes, sizeof *header);
    if (header->version != BN_FORMAT_VERSION)
        return bn_fail(detail, BN_ERR_VERSION, "format version is %" PRIu32 ", expected %d; %s",
                       header->version, BN_FORMAT_VERSION,
                       header->version < BN_FORMAT_VERSION ? "export or convert the model again"
                                                           : "use a newer bitnet-edge");
    if (header->flags & ~(uint32_t)BN_ADAPTER_ALONE)
        return bn_fail(detail, BN_ERR_VERSION, "header flags are 0x%" PRIx32 ", expected 0 or 1",
                       header->flags);
    if (header->file_size != size)
        return bn_fail(detail, header->file_size > size ? BN_ERR_TRUNCATED : BN_ERR_TRAILING,
                       "the file has %zu bytes, its header says %" PRIu64, size, header->file_size);
    if (size % BN_ALIGN != 0)
        return bn_fail(detail, BN_ERR_SECTION, "the file has %zu bytes, expected a multiple of %d",
                       size, BN_ALIGN);
    const uint32_t count = header->section_count;
    if (count < MIN_SECTIONS || count > MAX_SECTIONS)
        return bn_fail(detail, BN_ERR_SECTION, "section_count is %" PRIu32 ", expected %d to %d",
                       count, MIN_SECTIONS, MAX_SECTIONS);
    const size_t table_size = count * sizeof(bn_section_entry);
    if (table_size > size - sizeof *header)
        return bn_fail(detail, BN_ERR_SECTION,
                       "%" PRIu32 " sections need a table of %zu bytes, the file has %zu in all",
                       count, table_size, size);
    memcpy(opening->sections, bytes + sizeof *header, table_size);
    uint32_t crc =
        kernels->bytes.crc32(0, (const uint8_t *)header, offsetof(bn_header, header_crc));
    crc = kernels->bytes.crc32(crc, (const uint8_t *)opening->sections, table_size);
    if (crc != header->header_crc)
        return bn_fail(detail, BN_ERR_CHECKSUM,
                       "header and section table have checksum %08" PRIx32 ", expected %08" PRIx32,
                       crc, header->header_crc);
    const size_t used = header->flags ? offsetof(bn_weights, zero) : 0;
    if (!bn_all_zero(header->base + used, sizeof header->base - used))
        return bn_fail(detail, BN_ERR_VERSION, "reserved bytes of the header are not zero");
    return BN_OK;
}

static const char *section_name(uint32_t kind) {
    static const char *const names[] = {"",          "STACKS",   "TENSORS", "METADATA",
                                        "TOKENIZER", "TEMPLATE", "DATA"};
    return kind <= BN_SECTION_DATA ? names[kind] : "unknown";
}

/* Check one entry by itself: kind, flags, and the sizes that its kind requires. */
static bn_status check_entry(const bn_section_entry *s, char *detail) {
    const int known = s->kind >= BN_SECTION_STACKS && s->kind <= BN_SECTION_DATA;
    if (!known && !(s->flags & SECTION_OPTIONAL))
        return bn_fail(detail, BN_ERR_VERSION,
                       "section kind %" PRIu32 " is required but unknown to this build", s->kind);
    if (s->flags & ~(known ? 0u : (uint32_t)SECTION_OPTIONAL))
        return bn_fail(detail, BN_ERR_VERSION, "flags of section kind %" PRIu32 " are 0x%" PRIx32,
                       s->kind, s->flags);
    if (s->reserved != 0)
        return bn_fail(detail, BN_ERR_SECTION,
                       "reserved word of section kind %" PRIu32 " is %" PRIu32 ", expected 0",
                       s->kind, s->reserved);
    const size_t unit = s->kind == BN_SECTION_STACKS    ? sizeof(bn_config)
                        : s->kind == BN_SECTION_TENSORS ? sizeof(bn_record)
                                                        : 1;
    if (s->size == 0 || s->size % unit != 0)
        return bn_fail(detail, BN_ERR_SECTION,
                       "section %s has %" PRIu64 " bytes, expected a positive multiple of %zu",
                       section_name(s->kind), s->size, unit);
    if (s->kind == BN_SECTION_TEMPLATE && s->size > MAX_TEMPLATE)
        return bn_fail(detail, BN_ERR_SECTION,
                       "section TEMPLATE has %" PRIu64 " bytes, expected at most %d", s->size,
                       MAX_TEMPLATE);
    return BN_OK;
}

/* The layout is fully determined, so a valid file has no overlap and no hole. */
static bn_status read_sections(bn_file *file, const bn_opening *opening, char *detail) {
    const uint32_t count = opening->header.section_count;
    uint64_t end = sizeof(bn_header) + count * sizeof(bn_section_entry);
    uint32_t previous_kind = 0;
    for (uint32_t i = 0; i < count; i++) {
        const bn_section_entry s = opening->sections[i];
        if (s.kind <= previous_kind)
            return bn_fail(detail, BN_ERR_SECTION,
                           "section kind %" PRIu32 " follows kind %" PRIu32
                           ", expected ascending kinds from 1",
                           s.kind, previous_kind);
        const bn_status status = check_entry(&s, detail);
        if (status != BN_OK)
            return status;
        const uint64_t offset = bn_align(end);
        if (s.offset != offset || s.size > file->size - offset)
            return bn_fail(detail, BN_ERR_SECTION,
                           "section kind %" PRIu32 " is %" PRIu64 " bytes at %" PRIu64
                           ", expected at %" PRIu64 " within %zu bytes",
                           s.kind, s.size, s.offset, offset, file->size);
        if (!bn_all_zero(file->bytes + end, (size_t)(offset - end)))
            return bn_fail(detail, BN_ERR_SECTION,
                           "padding before section kind %" PRIu32 " is not zero", s.kind);
        if (s.kind <= BN_SECTION_DATA) {
            file->section[s.kind] = file->bytes + offset;
            file->section_size[s.kind] = (size_t)s.size;
        }
        if (s.kind == BN_SECTION_STACKS)
            file->weights.stacks_crc = s.crc;
        if (s.kind == BN_SECTION_TENSORS)
            file->weights.tensors_crc = s.crc;
        if (s.kind == BN_SECTION_DATA)
            file->weights.data_crc = s.crc, file->weights.data_size = s.size;
        end = offset + s.size;
        previous_kind = s.kind;
    }
    if (bn_align(end) != file->size)
        return bn_fail(detail, BN_ERR_SECTION,
                       "the last section ends at %" PRIu64 ", the file at %zu", end, file->size);
    if (!bn_all_zero(file->bytes + end, (size_t)(file->size - end)))
        return bn_fail(detail, BN_ERR_SECTION, "padding at the end of the file is not zero");
    static const uint32_t required[] = {BN_SECTION_STACKS, BN_SECTION_TENSORS, BN_SECTION_DATA};
    for (size_t i = 0; i < sizeof required / sizeof *required; i++)
        if (file->section[required[i]] == NULL)
            return bn_fail(detail, BN_ERR_SECTION, "section %s is missing",
                           section_name(required[i]));
    return BN_OK;
}

/* Copy STACKS and TENSORS; the size of STACKS keeps TENSORS aligned. Both are within the file, so
 * the sum of their sizes cannot overflow. */
static bn_status copy_tables(bn_file *file, char *detail) {
    const size_t stacks = file->section_size[BN_SECTION_STACKS];
    const size_t tensors = file->section_size[BN_SECTION_TENSORS];
    uint8_t *copy = malloc(stacks + tensors);
    if (copy == NULL)
        return bn_fail(detail, BN_ERR_MEMORY, "no memory for the tables' %zu bytes",
                       stacks + tensors);
    file->tables = copy;
    file->section[BN_SECTION_STACKS] = memcpy(copy, file->section[BN_SECTION_STACKS], stacks);
    file->section[BN_SECTION_TENSORS] =
        memcpy(copy + stacks, file->section[BN_SECTION_TENSORS], tensors);
    file->stacks = (const bn_config *)(const void *)copy;
    file->n_stacks = stacks / sizeof *file->stacks;
    file->tensors = (const bn_record *)(const void *)(copy + stacks);
    file->n_tensors = tensors / sizeof *file->tensors;
    file->data = file->section[BN_SECTION_DATA];
    file->data_size = file->section_size[BN_SECTION_DATA];
    return BN_OK;
}

static bn_status check_section_sums(const bn_file *file, const bn_opening *opening,
                                    const bn_kernels *kernels, char *detail) {
    for (uint32_t i = 0; i < opening->header.section_count; i++) {
        const bn_section_entry s = opening->sections[i];
        if (s.kind == BN_SECTION_DATA) /* checked by bn_file_verify */
            continue;
        const uint8_t *bytes =
            s.kind <= BN_SECTION_DATA ? file->section[s.kind] : file->bytes + s.offset;
        const uint32_t crc = kernels->bytes.crc32(0, bytes, (size_t)s.size);
        if (crc != s.crc)
            return bn_fail(detail, BN_ERR_CHECKSUM,
                           "section kind %" PRIu32 " (%s) has checksum %08" PRIx32
                           ", expected %08" PRIx32,
                           s.kind, section_name(s.kind), crc, s.crc);
    }
    return BN_OK;
}

/* A file with an adapter alone has no tokenizer and no template, and at least one stack with an
 * adapter. */
static bn_status check_alone(const bn_file *file, char *detail) {
    uint32_t adapters = 0;
    if (!file->adapter_alone)
        return BN_OK;
    for (uint32_t kind = BN_SECTION_TOKENIZER; kind <= BN_SECTION_TEMPLATE; kind++)
        if (file->section[kind])
            return bn_fail(detail, BN_ERR_SECTION, "an adapter alone has a section %s",
                           section_name(kind));
    for (size_t i = 0; i < file->n_stacks; i++)
        adapters |= file->stacks[i].adapters;
    return adapters ? BN_OK
                    : bn_fail(detail, BN_ERR_CONFIG,
                              "an adapter alone has adapters = 0 in each stack, expected a rank "
                              "and roles in one");
}

static bn_status parse(bn_file *file, const bn_kernels *kernels, char *detail) {
    bn_opening opening;
    bn_status status = read_head(file->bytes, file->size, kernels, &opening, detail);
    if (status != BN_OK)
        return status;
    file->header_crc = opening.header.header_crc;
    file->adapter_alone = opening.header.flags != 0;
    memcpy(&file->base, opening.header.base, sizeof file->base);
    status = read_sections(file, &opening, detail);
    if (status == BN_OK)
        status = copy_tables(file, detail);
    if (status == BN_OK)
        status = check_section_sums(file, &opening, kernels, detail);
    if (status == BN_OK)
        status = check_alone(file, detail);
    if (status == BN_OK)
        status = bn_check_stacks(file, detail);
    return status == BN_OK ? bn_check_tensors(file, detail) : status;
}

bn_status bn_file_parse(const uint8_t *bytes, size_t size, const bn_kernels *kernels, bn_file *file,
                        char *detail) {
    *file = (bn_file){.bytes = bytes, .size = size};
    if (size == 0)
        return bn_fail(detail, BN_ERR_TRUNCATED, "the file is empty, a header has 64 bytes");
    if ((uintptr_t)bytes % BN_ALIGN != 0)
        return bn_fail(detail, BN_ERR_ARGUMENT, "the bytes lie at %p, expected a multiple of %d",
                       (const void *)bytes, BN_ALIGN);
    const bn_status status = parse(file, kernels, detail);
    if (status != BN_OK)
        bn_file_close(file);
    return status;
}

void bn_file_close(bn_file *file) {
    free(file->tables);
    *file = (bn_file){0};
}
