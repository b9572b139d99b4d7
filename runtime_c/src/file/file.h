/* SPDX-License-Identifier: MIT
 *
 * file.h: the packed file as typed views into its bytes (export/FORMAT.md), except its tables,
 * which are copied.
 */
#ifndef BITNET_FILE_H
#define BITNET_FILE_H

#include "bitnet_runtime.h"
#include "kernels/kernels.h"
#include "linear/adapter.h"
#include "linear/tensor.h"
#include "system/status.h"
#include "system/threads.h"

enum {
    BN_FORMAT_VERSION = 3,
    BN_ALIGN = 64,         /* alignment of sections, tensors and scales */
    BN_NO_LAYER = 0xFFFF,  /* layer of a tensor outside the layers */
    BN_NO_EXPERT = 0xFFFF, /* expert of a tensor that has none */
    BN_SECTION_STACKS = 1, /* the other kinds are in bitnet_runtime.h */
    BN_SECTION_TENSORS = 2,
    BN_SECTION_DATA = 6
};
/* Bits of norm_flags and bias_flags, FORMAT.md §2. */
enum {
    BN_PRE_NORM = 1,
    BN_POST_NORM = 2,
    BN_SUB_NORM = 4,
    BN_LINEAR_NORMS = 8,
    BN_NORM_BIAS = 16,
    BN_QK_NORM = 32,
    BN_RESIDUAL_NORM = 64,
    BN_HAS_EMBEDDING_NORM = 128,
    BN_HAS_FINAL_NORM = 256,
    BN_BIAS_QKV = 1,
    BN_BIAS_O = 2,
    BN_BIAS_FFN = 4,
    BN_BIAS_HEAD = 8,
    BN_BIAS_PROJECTOR = 16,
    BN_BIAS_PATCH = 32
};
enum { BN_INPUT_TOKENS, BN_INPUT_EMBEDDINGS, BN_INPUT_IMAGES, BN_INPUT_DRAFT };
enum { BN_NORM_RMS, BN_NORM_LAYER };
enum { BN_POSITION_ROPE, BN_POSITION_LEARNED, BN_POSITION_SINUSOIDAL, BN_POSITION_NONE };
enum { BN_POOL_ATTENTION = 4 }; /* the others are in bitnet_runtime.h */
enum { BN_FFN_GATED = 0, BN_FFN_PLAIN = 1 };
enum { BN_ACT_RELU2, BN_ACT_SILU, BN_ACT_GELU, BN_ACT_RELU, BN_ACT_GELU_ERF };
enum { BN_ADAPTER_RANK = 0xFFFF, BN_ADAPTER_ROLES = 16 }; /* mask and first bit of `adapters` */
enum { BN_ADAPTER_ALONE = 1 };                            /* header flag */

/* One record of STACKS, word for word (FORMAT.md §2). */
typedef struct bn_config {
    uint32_t input, mask, vocab_size, dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim;
    uint32_t max_context, sliding_window, norm, norm_flags;
    float norm_eps;
    uint32_t ffn, activation, n_experts, experts_per_token, position;
    float rope_attention_factor;
    uint32_t bias_flags, tie_embeddings;
    float embedding_scale, residual_scale, attention_scale, attention_softcap, logit_softcap;
    uint32_t pooling, has_head, rope_dim, global_every, normalize_routing, first_position;
    uint32_t image_size, patch_size, channels;
    float pixel_mean[3], pixel_std[3];
    uint32_t class_token, out_dim;
    float similarity_scale, similarity_bias;
    uint32_t image_token, adapters;
    char name[64];
} bn_config;

/* One record of TENSORS, word for word (FORMAT.md §3). */
typedef struct bn_record {
    uint16_t stack, layer, role, expert;
    uint8_t part, encoding, scale_scope, reserved8;
    uint32_t reserved32;
    uint32_t rows, cols;
    uint64_t offset, size, scale_offset, scale_size, reserved64;
} bn_record;

/* Identifies the weights of a file (FORMAT.md §2, an adapter alone). */
typedef struct bn_weights {
    uint64_t data_size;
    uint32_t data_crc, stacks_crc, tensors_crc, zero[3];
} bn_weights;

typedef struct bn_file {
    const uint8_t *bytes;
    size_t size;
    const bn_config *stacks; /* [n_stacks] */
    size_t n_stacks;
    const bn_record *tensors; /* [n_tensors] */
    size_t n_tensors;
    void *tables;        /* memory of the two arrays */
    const uint8_t *data; /* the DATA section */
    size_t data_size;
    uint32_t header_crc;       /* of the header and the section table, which includes the checksums
                                * of all sections */
    bn_weights weights;        /* as stored; bn_file_verify compares the checksum of DATA */
    int adapter_alone;         /* 1: the file is an adapter alone, */
    bn_weights base;           /* for the model with these weights */
    const uint8_t *section[8]; /* by kind; NULL when absent */
    size_t section_size[8];
} bn_file;

/* Check the structure of a packed file and fill *file with views into `bytes` (64-byte aligned):
 * header, section table, padding, checksums of all sections except DATA, the stack records, and the
 * tensor table against exactly what the stacks require. Tables are copied before they are checked:
 * if the bytes change later, only values in DATA and the text of opaque sections change, never
 * sizes or offsets. On failure *file is empty and `detail` (BN_DETAIL_SIZE bytes or NULL) says what
 * was found and what was expected. */
bn_status bn_file_parse(const uint8_t *bytes, size_t size, const bn_kernels *kernels, bn_file *file,
                        char *detail);
void bn_file_close(bn_file *file); /* frees the copies, not the bytes; {0} is allowed */

/* BN_ERR_MAGIC, with a guess of the file's format in `detail`, unless it begins as packed files
 * do. */
bn_status bn_file_begins(const uint8_t *bytes, size_t size, char *detail);

/* Check what bn_file_parse did not: the checksum of DATA, zero padding, every float finite, every
 * scale normal and > 0, every code allowed by FORMAT.md §4; then RoPE frequencies against the
 * context, and sketches against their codes. One pass over DATA, at the speed of the checksum, and
 * another over matrices with a sketch, by the threads of `pool`, or by the caller alone if it is
 * NULL. */
bn_status bn_file_verify(const bn_file *file, const bn_kernels *kernels, bn_pool *pool,
                         char *detail);

/* A tensor with its bias and norm; data == NULL if it does not exist. layer is BN_NO_LAYER for
 * roles >= 64, expert is BN_NO_EXPERT for tensors that have none. */
bn_tensor bn_file_tensor(const bn_file *file, uint32_t stack, uint32_t layer, uint32_t role,
                         uint32_t expert);

/* The floats of a vector outside the layers, or NULL. */
const float *bn_file_vector(const bn_file *file, uint32_t stack, uint32_t role);

/* Number of linears in all layers; they are numbered from 1. bn_file_low_rank fills in the adapters
 * that the file has for them: linears[number], with one element more than there are linears, zeroed
 * before. */
uint32_t bn_file_linears(const bn_config *config);
void bn_file_low_rank(const bn_file *file, uint32_t stack, bn_low_rank *linears);

/* --- The parts of the reader, in the order bn_file_parse calls them --- */

bn_status bn_check_stacks(const bn_file *file, char *detail);  /* stacks.c */
bn_status bn_check_tensors(const bn_file *file, char *detail); /* tensors.c */

/* The name of a tensor in messages, e.g. "layers.3.down", "layers.0.experts.7.up.bias", with the
 * prefix "stacks.1." for all but the first stack. */
enum { BN_NAME_SIZE = 96 };
void bn_record_name(const bn_record *record, char name[BN_NAME_SIZE]);

/* x rounded up to BN_ALIGN; x is an offset in a file that is in memory, so nothing overflows. */
static inline uint64_t bn_align(uint64_t x) {
    return bn_round_up(x, BN_ALIGN);
}

static inline int bn_all_zero(const uint8_t *p, size_t n) {
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= p[i];
    return any == 0;
}

/* --- mapping.c: the bytes of a file on disk --- */

typedef struct bn_mapping {
    const uint8_t *bytes; /* 64-byte aligned */
    size_t size;
    int mapped; /* 1: mmap, 0: anonymous memory, -1: not ours */
} bn_mapping;

/* Open a regular file and map it, or read it into 2 MiB-aligned memory when no_mmap. */
bn_status bn_mapping_open(const char *path, int no_mmap, bn_mapping *mapping, char *detail);
void bn_mapping_close(bn_mapping *mapping);

#endif
