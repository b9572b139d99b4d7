/* SPDX-License-Identifier: MIT
 *
 * foreign.c: identifies files that are not packed files.
 */
#include <stdio.h>
#include <string.h>

#include "file.h"

static const uint8_t magic[8] = {0x89, 'B', 'I', 'T', 'N', 'E', 'T', '\n'};

enum { LOOK = 4096 }; /* bytes examined at the beginning */

/* Formats often mistaken for a packed file, with advice. */
static const char *foreign_format(const uint8_t *bytes, size_t size) {
    static const struct {
        const char *start, *name;
    } formats[] = {
        {"GGUF", "a GGUF file; bitnet convert makes a packed file of it"},
        {"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint"},
        {"\x1f\x8b", "a gzip archive; unpack it first"},
        {"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"},
        {"\x80\x02", "a Python pickle"},
        {"\x80\x03", "a Python pickle"},
        {"\x80\x04", "a Python pickle"},
        {"\x80\x05", "a Python pickle"},
        {"\x89HDF", "an HDF5 file"},
        {"version https://git-lfs",
         "a Git LFS pointer; git lfs pull fetches the file it stands for"},
        {"<", "HTML or XML text, perhaps an error page in place of the download"},
        {"{", "JSON text"},
        {"\x7f"
         "ELF",
         "an ELF program"},
        {"BITNET", "a packed file without its first byte"},
    };
    size_t blank = 0;
    while (blank < size && (bytes[blank] == ' ' || (bytes[blank] >= '\t' && bytes[blank] <= '\r')))
        blank++;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const size_t n = strlen(formats[i].start);
        if (size - blank >= n && memcmp(bytes + blank, formats[i].start, n) == 0)
            return formats[i].name;
    }
    if (size > 8 && bn_all_zero(bytes + 4, 4) && bytes[8] == '{') /* u64 length, then JSON */
        return "a safetensors file; bitnet convert makes a packed file of the folder it is in";
    if (size > 2 && bytes[0] == 0x08 && bytes[1] < 32 && bytes[2] == 0x12)
        return "an ONNX model"; /* ir_version, then producer_name */
    if (bn_all_zero(bytes, bn_min(size, BN_ALIGN)))
        return "zeros, perhaps an interrupted download";
    return NULL;
}

bn_status bn_file_begins(const uint8_t *bytes, size_t size, char *detail) {
    char found[3 * sizeof magic + 1] = "";
    if (memcmp(bytes, magic, bn_min(size, sizeof magic)) == 0)
        return BN_OK;
    const char *name = foreign_format(bytes, bn_min(size, LOOK));
    if (name != NULL)
        return bn_fail(detail, BN_ERR_MAGIC, "expected a packed bitnet file, this is %s", name);
    for (size_t i = 0; i < sizeof magic && i < size; i++)
        snprintf(found + 3 * i, 4, " %02x", bytes[i]);
    return bn_fail(
        detail, BN_ERR_MAGIC,
        "expected a packed bitnet file, as bitnet export writes it; this one begins with%s", found);
}
