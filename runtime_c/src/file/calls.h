/* SPDX-License-Identifier: MIT
 *
 * calls.h: the tensors that a configuration calls for (export/FORMAT.md §3, "Which tensors").
 */
#ifndef BITNET_CALLS_H
#define BITNET_CALLS_H

#include "file.h"

/* What there is of one role: one line of the table. */
typedef struct bn_call {
    bn_form form;
    uint32_t rows, cols; /* of the weight */
    int weight, bias;    /* which parts there are */
    uint32_t experts;    /* 0: one tensor that belongs to no expert */
    uint32_t rank;       /* of its adapter; 0: it has none */
} bn_call;

bn_call bn_call_for(const bn_config *c, uint32_t role);

#endif
