/* SPDX-License-Identifier: MIT
 *
 * batch.h: rows to compute together, of one text or of several, and what is wanted of each. All
 * that takes tokens makes one of these and runs it.
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
    size_t n;        /* of them, at most w->batch; w->room if those of a text see each other */
} bn_batch;

/* Wait for a turn for this session's model; no rows yet. */
bn_batch bn_batch_begin(const bn_session *s);
void bn_batch_end(bn_batch *b);

/* The next token of a session: rows of one are added one after the other. Where rows see those
 * behind them, cache.prefix has to say so before the batch is run. */
bn_row *bn_batch_add(bn_batch *b, bn_session *s, int32_t token, bn_want want);

/* Compute the rows: their sessions then hold them, and each has what was wanted. Fails with
 * BN_ERR_NUMERIC: then no session holds a row. */
bn_status bn_batch_run(bn_batch *b);

/* The session of a row that has its scores goes on from it. */
void bn_batch_take(const bn_batch *b, size_t row);

/* Run a text that a session goes on with in blocks, a turn each, so that nobody waits for a whole
 * prompt; in one, where tokens see those behind them. Of all but the last `each` is wanted, with
 * out + i·stride for token i, of the last `last`. */
bn_status bn_run_text(bn_session *s, const bn_text *text, bn_want each, bn_want last, float *out,
                      size_t stride);

#endif
