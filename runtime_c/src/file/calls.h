/* SPDX-License-Identifier: MIT
 *
 * calls.h: the tensors that a configuration requires (export/FORMAT.md §3, "Which tensors").
 */
#ifndef BITNET_CALLS_H
#define BITNET_CALLS_H

#include "file.h"

/* What a role requires: one line of the table. */
typedef struct bn_call {
    bn_form form;
    uint32_t rows, cols; /* of the weight */
    int weight, bias;    /* 1: this part exists */
    uint32_t experts;    /* 0: a single tensor, of no expert */
    uint32_t rank;       /* rank of its adapter; 0: none */
} bn_call;

/* Linears of a layer that can have an adapter, in the order of roles. Returns the place of a role
 * among them, from 1, which is also that of its bit in `adapters`; 0 if it is none of them. */
enum { BN_LINEARS = 7 };
uint32_t bn_linear_place(uint32_t role);

bn_call bn_call_for(const bn_config *c, uint32_t role);

#endif
