/* SPDX-License-Identifier: MIT
 *
 * workspace.h: scratch memory of a batch on its way through a stack. The text workspace belongs to
 * the model and is used by whoever has the turn (turn.h); nothing in it outlives the turn.
 */
#ifndef BITNET_WORKSPACE_H
#define BITNET_WORKSPACE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "linear/operands.h"
#include "row.h"

/* FORMAT.md §2 bounds every factor of a cache or a workspace so that no product reaches 2^62. */
#if SIZE_MAX < UINT64_MAX
#error "sizes of caches and workspaces need a size_t of 64 bits: compile for a 64-bit machine"
#endif

struct bn_buffer; /* workspace.c */

/* Floats from one row of n to the next: an odd number of cache lines. With a power of two, rows
 * would compete for a few cache sets: products write 32 rows at a time, and a set holds 8 or 12. */
static inline size_t bn_row_stride(size_t n) {
    return bn_round_up(n, BN_LANES) | BN_LANES;
}

/* Scratch memory of a mixture (mixture.h) for up to `rows` rows with k slots each. k: experts per
 * row, X: experts in all. */
typedef struct bn_slots {
    size_t rows;          /* 0: the stack has no mixture */
    float *logits;        /* [rows][X] */
    uint64_t *keys;       /* [threads][X] */
    uint32_t *expert;     /* [rows][k] */
    float *share;         /* [rows][k] */
    uint32_t *slot;       /* [rows][k] slot of each expert of a row */
    uint32_t *row;        /* [rows·k] row of each slot */
    uint32_t *network;    /* [rows·k] expert of each slot */
    uint32_t *end;        /* [threads][X] end of each expert's slots */
    size_t taken;         /* most experts that the rows can use */
    bn_group *groups;     /* [threads][taken] */
    bn_product *products; /* [threads][taken][2] */
    bn_operands in;       /* in, gate, up and y: as those of the workspace, for slots */
    float *gate, *up, *y;
} bn_slots;

/* Scratch memory for a step of up to B rows, and what up to R rows keep between steps. Rows of x,
 * q, kv, gate, up and y lie bn_row_stride of their length apart, also in slots. */
typedef struct bn_workspace {
    size_t batch;     /* B */
    size_t room;      /* R: B, or at least a whole context for non-causal masks */
    size_t n_ctx;     /* context that `partial` has room for */
    bn_row *rows;     /* [R] of the pass */
    float *x;         /* [R][D] the residual stream */
    float *q;         /* [R][H·E] */
    float *angle;     /* [R][BN_POSITION_TABLES][rope_dim] cos and sin of each row's position */
    bn_operands in;   /* operands of the linears */
    float *kv;        /* [B][2·G·E] */
    float *gate, *up; /* [B][F] outputs of the first products of a feed-forward network */
    float *y;         /* [B][D] output of a sublayer, if not added to x directly; scratch */
    float *attend;    /* [threads][attend_stride] */
    float *partial;   /* bn_partial_floats: results of chunks, if a context is split */
    atomic_size_t *chunks_done; /* [G] chunks completed */
    size_t attend_stride;
    float *scores;     /* [score_rows][V] logits, or estimates of them */
    size_t score_rows; /* rows whose logits are held at a time, at most B */
    bn_slots slots;
    const struct bn_buffer *buffers; /* [n_buffers] what the pointers above belong to */
    size_t n_buffers;
    size_t size; /* bytes of the whole allocation */
} bn_workspace;

/* Bytes that it takes, which increase with batch and n_ctx. */
size_t bn_workspace_size(const bn_model *m, const bn_stack *stack, size_t batch, size_t n_ctx);

/* NULL if out of memory. Freed with free(). */
bn_workspace *bn_workspace_new(const bn_model *m, const bn_stack *stack, size_t batch,
                               size_t n_ctx);

/* --- views: the same memory, with every pointer shifted to its part (workspace.c) --- */

/* A pass whose row 0 is `row`, with all scratch memory. */
bn_workspace bn_workspace_from(const bn_workspace *w, size_t row);

/* For one thread alone that processes only that row, while others process other rows: without
 * mixtures and attention. */
bn_workspace bn_workspace_alone(const bn_workspace *w, size_t row, size_t thread);

/* For one of several threads that share the scratch memory, and its number of rows for each. Row 0
 * is `row`. */
bn_workspace bn_workspace_part(const bn_workspace *w, size_t row, size_t thread, size_t threads);
size_t bn_workspace_share(const bn_workspace *w, size_t threads);

#endif
