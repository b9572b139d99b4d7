/* SPDX-License-Identifier: MIT
 *
 * batch.h: rows of one or several texts to compute together, and what is wanted of each. Every call
 * that takes tokens builds a batch and runs it.
 */
#ifndef BITNET_BATCH_H
#define BITNET_BATCH_H

#include "bitnet_runtime.h"
#include "session.h"
#include "workspace.h"

/* A turn on a model: its threads and its workspace, from begin to end. */
typedef struct bn_batch {
    const bn_model *m;
    const bn_stack *stack;
    bn_workspace *w; /* its rows are the batch's */
    size_t n;        /* rows so far, at most w->batch; w->room if the rows of a text see each
                      * other */
} bn_batch;

/* Wait for a turn on this session's model; the batch starts without rows. */
bn_batch bn_batch_begin(const bn_session *s);
void bn_batch_end(bn_batch *b);

/* Add the next token of a session; rows of one session are added consecutively. If rows see later
 * positions, cache.prefix must be set before the batch is run. */
bn_row *bn_batch_add(bn_batch *b, bn_session *s, int32_t token, bn_want want);

/* Compute the rows: their sessions then hold them, and what was wanted is delivered. Fails with
 * BN_ERR_NUMERIC, among others: no session then holds any of the rows. */
bn_status bn_batch_run(bn_batch *b);

/* Make a row with scores the last row of its session, which takes its state. */
void bn_batch_take(const bn_batch *b, size_t row);

/* The scores of a row, [V] in the workspace. ready: BN_READY_ESTIMATES or BN_READY_LOGITS. */
float *bn_batch_scores(const bn_batch *b, size_t row, int32_t *ready);

/* Append a text in blocks, one turn each, so that nobody waits for a whole prompt; in a single turn
 * if tokens see later ones. `each` is wanted of all tokens but the last, `last` of the last;
 * results of token i go to out + i·stride. */
bn_status bn_run_text(bn_session *s, const bn_text *text, bn_want each, bn_want last, float *out,
                      size_t stride);

#endif
