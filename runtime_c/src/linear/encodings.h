/* SPDX-License-Identifier: MIT
 *
 * encodings.h: how a tensor may be stored (export/FORMAT.md §4). All that is particular to an
 * encoding stands in its row of the table in encodings.c: what it is for, how many bytes it takes,
 * what they may not hold, and how it is multiplied. Everything else asks the row.
 *
 * A new encoding is a number here, a row there, and the functions that the row names, in a file of
 * their own.
 */
#ifndef BITNET_ENCODINGS_H
#define BITNET_ENCODINGS_H

#include "bitnet_runtime.h"
#include "kernels/kernels.h"
#include "system/threads.h"

/* The numbers in the file. */
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

/* What a tensor is: norms, biases and tables of frequencies; the projections of a layer; embedding
 * and head; router and positions; parts of an adapter. */
typedef enum bn_form { BN_VECTOR, BN_LINEAR, BN_TABLE, BN_DENSE, BN_LOW_RANK } bn_form;

struct bn_input; /* operands.h */
struct bn_product;
struct bn_tensor; /* tensor.h */

/* What some bytes may not hold. */
typedef struct bn_rule {
    int (*broken)(const uint8_t *p, size_t n); /* NULL: they may hold anything */
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

    /* where it may be */
    uint32_t forms, scopes; /* bits, 1 << bn_form and 1 << BN_SCALE_... */
    uint32_t only_role;     /* 0: any */
    uint32_t most_cols;     /* 0: any number */

    /* its bytes: parts that follow one another, each of whole 64 bytes but for the last */
    bn_stored parts[BN_PARTS]; /* no size: there is none */
    /* The first row whose later parts do not follow from its codes, or `rows`; NULL: none has to.
     * And what those parts are called. pool: NULL for the calling thread alone. */
    size_t (*wrong_row)(const uint8_t *data, size_t rows, size_t cols, const bn_kernels *kernels,
                        bn_pool *pool);
    const char *derived;

    /* its product, one of two: outputs of panels [panel, panel + n), n·16 <= BN_CHUNK_ROWS, by the
     * calling thread, with [rows][BN_CHUNK_ROWS] of scratch; or all outputs, by all threads, some
     * of whose bytes need not be read */
    void (*multiply)(const struct bn_input *in, const struct bn_product *p, size_t panel, size_t n,
                     int32_t *acc);
    void (*multiply_lines)(const struct bn_input *in, const struct bn_product *p);
    int by_tables; /* ternary_lookup multiplies it too, unless its scope is group */
    int ternary;   /* it counts as ternary weights */
    int screens;   /* a head is found by its sketch: a token reads all but the codes */

    /* x[0..cols) = one row, of an encoding that is for tables */
    void (*row)(const bn_kernels *kernels, const struct bn_tensor *t, size_t row, float *x);
} bn_encoding;

/* The row of a number in a file, or NULL. */
const bn_encoding *bn_encoding_of(uint32_t number);

/* The same for scale scopes, whose bytes are one part. */
const bn_stored *bn_scales_of(uint32_t scope);

/* Bytes of a tensor's data / scales; return 0 on overflow or an unknown encoding / scope. The
 * one place where sizes are computed. */
int bn_tensor_data_size(uint32_t encoding, uint64_t rows, uint64_t cols, uint64_t *size);
int bn_tensor_scale_size(uint32_t scope, uint64_t rows, uint64_t cols, uint64_t *size);

#endif
