/* SPDX-License-Identifier: MIT
 *
 * file_sizes.c: what a tensor record means by itself: its bytes and its name. The one place
 * where sizes of tensors are computed.
 */
#include "file.h"

#include <stdio.h>

/* --- sizes, in checked arithmetic --- */

static int round_up(uint64_t x, uint64_t unit, uint64_t *units) {
    uint64_t sum;
    if (__builtin_add_overflow(x, unit - 1, &sum))
        return 0;
    *units = sum / unit;
    return 1;
}

/* Bytes of tiles with tile_k columns. */
static int tiles_size(uint64_t rows, uint64_t cols, uint64_t tile_k, uint64_t *size) {
    uint64_t panels, tiles;
    return round_up(rows, BN_PANEL, &panels) && round_up(cols, tile_k, &tiles) &&
           !__builtin_mul_overflow(panels, tiles, size) &&
           !__builtin_mul_overflow(*size, BN_TILE_BYTES, size);
}

/* Bytes of `lines` lines of `codes` codes, `block` of them in 64 bytes. */
static int lines_size(uint64_t lines, uint64_t codes, uint64_t block, uint64_t *size) {
    uint64_t blocks;
    return round_up(codes, block, &blocks) && !__builtin_mul_overflow(lines, blocks, size) &&
           !__builtin_mul_overflow(*size, BN_TILE_BYTES, size);
}

static int sketch_size(uint64_t rows, uint64_t cols, bn_sketch_parts *at, uint64_t *size) {
    uint64_t tiles, floats;
    return lines_size(rows, cols, BN_INT8_UNIT, &at->tiles) &&
           tiles_size(rows, cols, BN_TERNARY_TILE_K, &tiles) &&
           tiles_size(rows, 1, 1, &floats) && /* 16 rows, 4 bytes each */
           !__builtin_add_overflow(at->tiles, tiles, &at->step) &&
           !__builtin_add_overflow(at->step, floats, &at->deviation) &&
           !__builtin_add_overflow(at->deviation, floats, size);
}

bn_sketch_parts bn_sketch_at(uint64_t rows, uint64_t cols) {
    bn_sketch_parts at = {0};
    uint64_t size;
    sketch_size(rows, cols, &at, &size);
    return at;
}

int bn_tensor_data_size(uint32_t encoding, uint64_t rows, uint64_t cols, uint64_t *size) {
    bn_sketch_parts parts;
    switch (encoding) {
    case BN_F32:
    case BN_F16:
        return !__builtin_mul_overflow(rows, cols, size) &&
               !__builtin_mul_overflow(*size, encoding == BN_F32 ? 4u : 2u, size);
    case BN_TERNARY_2BIT:
        return tiles_size(rows, cols, BN_TERNARY_TILE_K, size);
    case BN_TERNARY_5TRIT:
        return tiles_size(rows, cols, BN_TRIT_TILE_K, size);
    case BN_INT8_ROWS:
        return lines_size(rows, cols, BN_INT8_UNIT, size);
    case BN_TERNARY_2BIT_ROWS:
        return lines_size(rows, cols, 4 * BN_TILE_BYTES, size);
    case BN_TERNARY_2BIT_COLUMNS:
        return lines_size(cols, rows, 4 * BN_TILE_BYTES, size);
    case BN_INT8_SKETCH:
        return sketch_size(rows, cols, &parts, size);
    default:
        return 0;
    }
}

int bn_tensor_scale_size(uint32_t scope, uint64_t rows, uint64_t cols, uint64_t *size) {
    uint64_t panels, groups;
    switch (scope) {
    case BN_SCALE_NONE:
        *size = 0;
        return 1;
    case BN_SCALE_TENSOR:
        *size = sizeof(float);
        return 1;
    case BN_SCALE_ROW:
        return !__builtin_mul_overflow(rows, sizeof(float), size);
    case BN_SCALE_GROUP:
        return round_up(rows, BN_PANEL, &panels) && round_up(cols, BN_SCALE_GROUP_K, &groups) &&
               !__builtin_mul_overflow(panels, groups, size) &&
               !__builtin_mul_overflow(*size, BN_PANEL * sizeof(uint16_t), size);
    default:
        return 0;
    }
}

/* --- names --- */

static const char *role_name(uint32_t role) {
    static const char *const of_layer[BN_LAYER_ROLES] = {
        [BN_ATTN_NORM] = "attn_norm",
        [BN_Q] = "q",
        [BN_K] = "k",
        [BN_V] = "v",
        [BN_Q_NORM] = "q_norm",
        [BN_K_NORM] = "k_norm",
        [BN_ATTN_SUB_NORM] = "attn_sub_norm",
        [BN_O] = "o",
        [BN_ATTN_POST_NORM] = "attn_post_norm",
        [BN_FFN_NORM] = "ffn_norm",
        [BN_ROUTER] = "router",
        [BN_GATE] = "gate",
        [BN_UP] = "up",
        [BN_FFN_SUB_NORM] = "ffn_sub_norm",
        [BN_DOWN] = "down",
        [BN_FFN_POST_NORM] = "ffn_post_norm",
    };
    static const char *const of_stack[] = {"embedding",
                                           "position",
                                           "final_norm",
                                           "head",
                                           NULL,
                                           "rope_frequencies",
                                           "rope_local_frequencies"};
    if (role < BN_LAYER_ROLES)
        return of_layer[role];
    if (role >= BN_EMBEDDING && role <= BN_ROPE_LOCAL_FREQUENCIES)
        return of_stack[role - BN_EMBEDDING];
    return NULL;
}

void bn_record_name(const bn_record *r, char name[BN_NAME_SIZE]) {
    char stack[16] = "", layer[16] = "", expert[16] = "", role[24];
    const int linear_norm = r->role > BN_LINEAR_NORM && r->role < BN_EMBEDDING;
    const int table = r->role == BN_ROPE_FREQUENCIES || r->role == BN_ROPE_LOCAL_FREQUENCIES;
    const char *known = role_name(linear_norm ? r->role - (uint32_t)BN_LINEAR_NORM : r->role);
    if (r->stack != 0)
        snprintf(stack, sizeof stack, "stacks.%u.", r->stack);
    if (r->layer != BN_NO_LAYER)
        snprintf(layer, sizeof layer, "layers.%u.", r->layer);
    if (r->expert != BN_NO_EXPERT)
        snprintf(expert, sizeof expert, "experts.%u.", r->expert);
    if (known != NULL)
        snprintf(role, sizeof role, "%s%s", known, linear_norm ? "_linear_norm" : "");
    else
        snprintf(role, sizeof role, "role %u", r->role);
    snprintf(name, BN_NAME_SIZE, "%s%s%s%s%s", stack, layer, expert, role,
             table     ? ""
             : r->part ? ".bias"
                       : ".weight");
}
