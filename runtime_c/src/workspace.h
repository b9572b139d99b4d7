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

/* Scratch memory for a step of up to B rows, and what up to R rows keep between steps. */
typedef struct bn_workspace {
    size_t batch;   /* B */
    size_t room;    /* R: B, or at least a whole context for non-causal masks */
    size_t n_ctx;   /* context that `partial` has room for */
    bn_row *rows;   /* [R] of the pass */
    float *x;       /* [R][D] the residual stream */
    float *q;       /* [R][H·E] */
    float *angle;   /* [2][R][rope_dim] cos and sin of each row's position, by table */
    bn_operands in; /* operands of the linears */
    float *kv;      /* [B][2·G·E] */
    float *ffn;     /* bn_ffn_floats: scratch of a feed-forward network */
    float *y;       /* [B][D] output of a sublayer, if not added to x directly; scratch */
    float *attend;  /* [threads][attend_stride] */
    float *partial; /* bn_partial_floats: results of chunks, if a context is split */
    atomic_size_t *chunks_done; /* [G] chunks completed */
    size_t attend_stride;
    float *scores;          /* [score_rows][V] logits, or estimates of them */
    size_t score_rows;      /* rows whose logits are held at a time, at most B */
    struct bn_slots *slots; /* of a mixture (mixture.h), or NULL */
    size_t size;            /* bytes of the whole allocation */
} bn_workspace;

/* Bytes that it takes, which increase with batch and n_ctx. */
size_t bn_workspace_size(const bn_model *m, const bn_stack *stack, size_t batch, size_t n_ctx);

/* NULL if out of memory. Freed with free(). */
bn_workspace *bn_workspace_new(const bn_model *m, const bn_stack *stack, size_t batch,
                               size_t n_ctx);

/* The same memory, shifted so that `row` is row 0. */
bn_workspace bn_workspace_from(const bn_workspace *w, const bn_config *c, size_t row);

/* The same for one thread that processes only that row, while others process other rows: its
 * operands, and the scratch for a product. */
bn_workspace bn_workspace_alone(const bn_workspace *w, const bn_config *c, size_t row,
                                size_t thread);

/* Rows per thread if the threads share the scratch memory. */
size_t bn_workspace_share(const bn_workspace *w, size_t threads);

/* The workspace of one thread that works alone with its share of the scratch memory, stored in
 * `part`. It must not use `partial`, which all threads share. */
struct bn_part;
void bn_workspace_part(const bn_workspace *w, const bn_config *c, size_t thread, size_t threads,
                       struct bn_part *part);

#endif
