/* SPDX-License-Identifier: MIT
 *
 * encodings.h: encodings that tensors are stored in (export/FORMAT.md §4). Everything specific to
 * an encoding is in its row of the table in encodings.c: what it may be used for, its size, which
 * values are invalid, and how it is multiplied. All other code consults the row.
 *
 * A new encoding needs a number here, a row there, and the functions that the row names, in a file
 * of their own.
 */
#ifndef BITNET_ENCODINGS_H
#define BITNET_ENCODINGS_H

#include "bitnet_runtime.h"
#include "kernels/kernels.h"
#include "system/threads.h"

/* Encoding numbers in the file. */
enum {
    BN_F32 = 1,
    BN_F16 = 2,
    BN_TERNARY_2BIT = 4,
    BN_TERNARY_5TRIT = 5,
    BN_INT8_ROWS = 6,
    BN_TERNARY_2BIT_ROWS = 7,
    BN_TERNARY_2BIT_COLUMNS = 8,
    BN_INT8_SKETCH = 9
};
enum { BN_SCALE_NONE = 0, BN_SCALE_TENSOR = 1, BN_SCALE_ROW = 2, BN_SCALE_GROUP = 3 };

/* Form of a tensor: BN_VECTOR: norms, biases, frequency tables; BN_LINEAR: projections of a
 * layer; BN_TABLE: embedding and head; BN_DENSE: router, positions, patches and projector;
 * BN_LOW_RANK: parts of an adapter. */
typedef enum bn_form { BN_VECTOR, BN_LINEAR, BN_TABLE, BN_DENSE, BN_LOW_RANK } bn_form;

struct bn_input; /* operands.h */
struct bn_product;
struct bn_tensor; /* tensor.h */

/* A check for invalid bytes. */
typedef struct bn_rule {
    int (*broken)(const uint8_t *p, size_t n); /* NULL: all bytes are valid */
    bn_status status;
    const char *text;
} bn_rule;

typedef struct bn_stored {
    int (*size)(uint64_t rows, uint64_t cols, uint64_t *size); /* bytes; returns 0 on overflow */
    bn_rule rule;
} bn_stored;

enum { BN_PARTS = 3 };

typedef struct bn_encoding {
    const char *name;

    /* where it may be used */
    uint32_t forms, scopes; /* bits, 1 << bn_form and 1 << BN_SCALE_... */
    uint32_t only_role;     /* 0: any */
    uint32_t most_cols;     /* 0: any number */

    /* its bytes: contiguous parts, each a multiple of 64 bytes except the last */
    bn_stored parts[BN_PARTS]; /* size is NULL: no such part */
    /* Returns the first row whose later parts do not follow from its codes, or `rows`; NULL: no
     * part is derived. pool: NULL for the calling thread alone. `derived` names those parts in
     * messages. */
    size_t (*wrong_row)(const uint8_t *data, size_t rows, size_t cols, const bn_kernels *kernels,
                        bn_pool *pool);
    const char *derived;

    /* its product, one of two. multiply: outputs of panels [panel, panel + n), n·16 <=
     * BN_CHUNK_ROWS, by the calling thread, with scratch acc [rows][BN_CHUNK_ROWS]. multiply_lines:
     * all outputs, by all threads, skipping lines that are not needed. */
    void (*multiply)(const struct bn_input *in, const struct bn_product *p, size_t panel, size_t n,
                     int32_t *acc);
    void (*multiply_lines)(const struct bn_input *in, const struct bn_product *p);
    int by_tables; /* ternary_lookup can multiply it, unless its scope is GROUP */
    int ternary;   /* it counts as ternary weights */
    int screens;   /* a head is screened by its sketch: a token reads all but the codes */

    /* x[0..cols) = one row; NULL: not an encoding of tables */
    void (*row)(const bn_kernels *kernels, const struct bn_tensor *t, size_t row, float *x);
} bn_encoding;

/* The table row of an encoding number, or NULL. */
const bn_encoding *bn_encoding_of(uint32_t number);

/* The same for scale scopes, whose bytes are one part. */
const bn_stored *bn_scales_of(uint32_t scope);

/* Bytes of a tensor's data / scales; return 0 on overflow or an unknown encoding / scope. All sizes
 * are computed here. */
int bn_tensor_data_size(uint32_t encoding, uint64_t rows, uint64_t cols, uint64_t *size);
int bn_tensor_scale_size(uint32_t scope, uint64_t rows, uint64_t cols, uint64_t *size);

#endif
