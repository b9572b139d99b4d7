/* SPDX-License-Identifier: MIT
 *
 * workspace.h: scratch memory of a batch on its way through a stack. That of texts belongs to the
 * model and to whoever has the turn (turn.h); nothing in it outlives that.
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

/* Scratch memory for a step of up to B rows, and what stays of up to R rows from step to step. */
typedef struct bn_workspace {
    size_t batch;   /* B */
    size_t room;    /* R: B, or more and all of a context, where rows see what is behind */
    size_t n_ctx;   /* tokens that `partial` has room for */
    bn_row *rows;   /* [R] of the pass */
    float *x;       /* [R][D] the residual stream */
    float *q;       /* [R][H·E] */
    float *angle;   /* [2][R][rope_dim] cos and sin of each row's position, by table */
    bn_operands in; /* of the linears */
    float *kv;      /* [B][2·G·E] */
    float *ffn;     /* bn_ffn_floats: scratch of a feed-forward network */
    float *y;       /* [B][D] a sublayer's output, when it is not added to x at once; scratch */
    float *attend;  /* [threads][attend_stride] */
    float *partial; /* bn_partial_floats: results of chunks, when a context is split */
    atomic_size_t *chunks_done; /* [G] how many are there */
    size_t attend_stride;
    float *scores;          /* [score_rows][V] logits, or estimates of them */
    size_t score_rows;      /* bn_score_rows */
    struct bn_slots *slots; /* of a mixture (mixture.h), or NULL */
    size_t size;            /* bytes of all this */
} bn_workspace;

/* Rows whose logits are there at a time, of so many. */
size_t bn_score_rows(const bn_stack *stack, size_t batch);

/* The memory it takes, which grows with both. */
size_t bn_workspace_size(const bn_model *m, const bn_stack *stack, size_t batch, size_t n_ctx);

/* NULL: no memory. To be freed with free. */
bn_workspace *bn_workspace_new(const bn_model *m, const bn_stack *stack, size_t batch,
                               size_t n_ctx);

/* The same memory seen from a row of the pass on: there it is row 0. */
bn_workspace bn_workspace_from(const bn_workspace *w, const bn_config *c, size_t row);

/* And as one thread has it that works alone on that row, while others do so on others: what is
 * norm'd and quantized there, and what a product of it needs. */
bn_workspace bn_workspace_alone(const bn_workspace *w, const bn_config *c, size_t row,
                                size_t thread);

/* Rows that each of so many threads has scratch memory for when they share what there is. */
size_t bn_workspace_share(const bn_workspace *w, size_t threads);

/* The workspace as one thread has it that works alone, with its share of the scratch memory. All of
 * it lies in `part`; `partial`, which belongs to no thread, is not for it. */
struct bn_part;
void bn_workspace_part(const bn_workspace *w, const bn_config *c, size_t thread, size_t threads,
                       struct bn_part *part);

#endif
