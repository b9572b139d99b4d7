/* SPDX-License-Identifier: MIT
 *
 * encodings.c: the table of encodings, and of scale scopes.
 */
#include "encodings.h"

#include "lines.h"
#include "rows.h"
#include "sizes.h"
#include "sketch.h"
#include "tiles.h"
#include "values.h"

/* --- sizes --- */

static int f32_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    return bn_values_size(rows, cols, sizeof(float), size);
}

static int f16_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    return bn_values_size(rows, cols, sizeof(uint16_t), size);
}

static int two_bit_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    return bn_tiles_size(rows, cols, BN_TERNARY_TILE_K, size);
}

static int trits_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    return bn_tiles_size(rows, cols, BN_TRIT_TILE_K, size);
}

static int int8_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    return bn_lines_size(rows, cols, BN_INT8_UNIT, size);
}

static int rows_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    return bn_lines_size(rows, cols, 4 * BN_TILE_BYTES, size);
}

static int columns_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    return bn_lines_size(cols, rows, 4 * BN_TILE_BYTES, size);
}

static int no_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    (void)rows, (void)cols;
    *size = 0;
    return 1;
}

static int one_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    (void)rows, (void)cols;
    *size = sizeof(float);
    return 1;
}

static int each_row_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    (void)cols;
    return bn_values_size(rows, 1, sizeof(float), size);
}

/* A panel has 16 halves for each group. */
static int each_group_size(uint64_t rows, uint64_t cols, uint64_t *size) {
    uint64_t tiles;
    if (!bn_tiles_size(rows, cols, BN_SCALE_GROUP_K, &tiles))
        return 0;
    *size = tiles / BN_TILE_BYTES * (BN_PANEL * sizeof(uint16_t));
    return 1;
}

/* --- the tables --- */

#define NO_TERNARY_3                                                                               \
    { bn_has_ternary_3, BN_ERR_CODE, "a ternary code is 3, expected 0, 1 or 2" }
#define NO_BAD_SCALE                                                                               \
    { bn_has_bad_scale, BN_ERR_SCALE, "a scale is not finite, normal and > 0" }
#define NO_INT8_LEAST                                                                              \
    { bn_has_int8_least, BN_ERR_CODE, "an int8 code is -128, expected -127 to 127" }

enum {
    NONE = 1 << BN_SCALE_NONE,
    TENSOR = 1 << BN_SCALE_TENSOR,
    ROW = 1 << BN_SCALE_ROW,
    GROUP = 1 << BN_SCALE_GROUP,
    VECTOR = 1 << BN_VECTOR,
    LINEAR = 1 << BN_LINEAR,
    TABLE = 1 << BN_TABLE,
    DENSE = 1 << BN_DENSE,
    LOW_RANK = 1 << BN_LOW_RANK
};

static const bn_encoding encodings[] = {
    [BN_F32] =
        {
            .name = "F32",
            .forms = VECTOR | LINEAR | TABLE | DENSE,
            .scopes = NONE,
            .parts = {{f32_size, {bn_has_not_finite_f32, BN_ERR_SCALE, "a value is not finite"}}},
            .multiply = bn_multiply_f32,
            .row = bn_row_f32,
        },
    [BN_F16] =
        {
            .name = "F16",
            .forms = LINEAR | TABLE | DENSE,
            .scopes = NONE,
            .parts = {{f16_size, {bn_has_not_finite_f16, BN_ERR_SCALE, "a value is not finite"}}},
            .multiply = bn_multiply_f16,
            .row = bn_row_f16,
        },
    [BN_TERNARY_2BIT] =
        {
            .name = "TERNARY_2BIT",
            .forms = LINEAR | TABLE,
            .scopes = TENSOR | ROW | GROUP,
            .parts = {{two_bit_size, NO_TERNARY_3}},
            .multiply = bn_multiply_two_bit,
            .by_tables = 1,
            .ternary = 1,
            .row = bn_row_two_bit,
        },
    [BN_TERNARY_5TRIT] =
        {
            .name = "TERNARY_5TRIT",
            .forms = LINEAR,
            .scopes = TENSOR | ROW,
            .most_cols = BN_TRIT_MAX_K,
            .parts = {{trits_size,
                       {bn_has_no_trits, BN_ERR_CODE,
                        "a byte does not encode five ternary codes"}}},
            .multiply = bn_multiply_trits,
            .ternary = 1,
        },
    [BN_INT8_ROWS] =
        {
            .name = "INT8_ROWS",
            .forms = LINEAR | TABLE | LOW_RANK,
            .scopes = ROW,
            .most_cols = BN_INT8_MAX_K,
            .parts = {{int8_size, NO_INT8_LEAST}},
            .multiply = bn_multiply_int8,
            .row = bn_row_int8,
        },
    [BN_TERNARY_2BIT_ROWS] =
        {
            .name = "TERNARY_2BIT_ROWS",
            .forms = LINEAR,
            .scopes = TENSOR | ROW,
            .only_role = BN_UP,
            .parts = {{rows_size, NO_TERNARY_3}},
            .multiply_lines = bn_multiply_rows,
            .ternary = 1,
        },
    [BN_TERNARY_2BIT_COLUMNS] =
        {
            .name = "TERNARY_2BIT_COLUMNS",
            .forms = LINEAR,
            .scopes = TENSOR | ROW,
            .only_role = BN_DOWN,
            .parts = {{columns_size, NO_TERNARY_3}},
            .multiply_lines = bn_multiply_columns,
            .ternary = 1,
        },
    [BN_INT8_SKETCH] =
        {
            .name = "INT8_SKETCH",
            .forms = TABLE,
            .scopes = ROW,
            .parts = {{int8_size, NO_INT8_LEAST},
                      {two_bit_size, {NULL, BN_OK, NULL}}, /* all four codes are valid */
                      {bn_steps_size,
                       {bn_has_negative, BN_ERR_SCALE,
                        "a step or deviation is not finite and >= 0"}}},
            .wrong_row = bn_wrong_sketch,
            .derived = "sketch",
            .multiply = bn_multiply_int8,
            .screens = 1,
            .row = bn_row_int8,
        },
};

static const bn_stored scales[] = {
    [BN_SCALE_NONE] = {no_size, {NULL, BN_OK, NULL}},
    [BN_SCALE_TENSOR] = {one_size, NO_BAD_SCALE},
    [BN_SCALE_ROW] = {each_row_size, NO_BAD_SCALE},
    [BN_SCALE_GROUP] = {each_group_size,
                        {bn_has_bad_group_scale, BN_ERR_SCALE,
                         "a group scale is not finite and > 0"}},
};

const bn_encoding *bn_encoding_of(uint32_t number) {
    return number < sizeof encodings / sizeof *encodings && encodings[number].name
               ? &encodings[number]
               : NULL;
}

const bn_stored *bn_scales_of(uint32_t scope) {
    return scope < sizeof scales / sizeof *scales ? &scales[scope] : NULL;
}

int bn_tensor_data_size(uint32_t encoding, uint64_t rows, uint64_t cols, uint64_t *size) {
    const bn_encoding *e = bn_encoding_of(encoding);
    uint64_t part;
    *size = 0;
    for (size_t i = 0; e && i < BN_PARTS && e->parts[i].size; i++)
        if (!e->parts[i].size(rows, cols, &part) || __builtin_add_overflow(*size, part, size))
            return 0;
    return e != NULL;
}

int bn_tensor_scale_size(uint32_t scope, uint64_t rows, uint64_t cols, uint64_t *size) {
    const bn_stored *stored = bn_scales_of(scope);
    return stored && stored->size(rows, cols, size);
}
