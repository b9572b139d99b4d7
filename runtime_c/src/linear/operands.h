/* SPDX-License-Identifier: MIT
 *
 * operands.h: inputs, scratch memory and outputs of products.
 */
#ifndef BITNET_OPERANDS_H
#define BITNET_OPERANDS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "system/threads.h"
#include "tensor.h"

struct bn_adapter; /* adapter.h */

enum { BN_GROUP_PRODUCTS = 3 }; /* most products of a group */
/* Output rows, and their panels, that a thread computes at a time: the sums stay in cache. */
enum { BN_CHUNK_ROWS = 128, BN_CHUNK_PANELS = BN_CHUNK_ROWS / BN_PANEL };

/* Scratch memory of products. */
typedef struct bn_product_scratch {
    int32_t *acc; /* [threads][acc_stride]: [B][BN_CHUNK_ROWS], or sums of a block (lookup.c) */
    size_t acc_stride;
    uint8_t *lookup; /* [threads][lookup_stride] scratch of ternary_lookup, or NULL */
    size_t lookup_stride;
    size_t lookup_rows; /* most rows of a block in lookup.c, whole panels */
    uint64_t *skipped;  /* [threads] bytes of lines that a pass has skipped */
} bn_product_scratch;

/* Inputs of linears for B rows, and scratch memory to multiply them. */
typedef struct bn_operands {
    const bn_kernels *kernels;
    bn_pool *pool;
    size_t wide;         /* floats of a row of h */
    size_t q_stride;     /* bytes of a row of q */
    float *h;            /* [B][wide] inputs before quantization, for linears that need them */
    int8_t *q;           /* [B][q_stride] quantized inputs */
    float *s;            /* [B] scale of q: q = round(h·s) */
    int32_t *q_sum;      /* [B] Σq */
    int32_t *group_sums; /* [B][group_sums_stride] Σq of each 128, for group scales; or unused */
    size_t group_sums_stride;
    bn_product_scratch scratch;
    const struct bn_adapter **adapters; /* [B] adapter of each row, or NULL */
    int32_t some_adapted;               /* at least one row has an adapter */
    const struct bn_adapter *own;       /* the model's adapter, for all rows, or NULL */
    size_t most_rank;                   /* largest rank of an adapter; 0: there is none */
    float *low; /* [B][2·BN_GROUP_PRODUCTS][most_rank] scratch of adapters */
} bn_operands;

/* Rows [first, first + rows) of the operands. */
typedef struct bn_input {
    const bn_operands *o;
    size_t first, rows;
} bn_input;

/* One product of a group that shares its input: y[b] = W·input[b], or y[b] +=
 * scale·(W·input[b]). */
typedef struct bn_product {
    const bn_tensor *w;
    float *y;
    size_t y_stride;
    const float *where; /* NULL, or laid out as y: where not > 0, y is not needed and may be 0 */
    int32_t accumulate; /* add to what y holds */
    float scale;        /* multiplies the product when accumulating */
} bn_product;

/* The product from row b on. */
static inline bn_product bn_product_from(const bn_product *p, size_t b) {
    bn_product rest = *p;
    rest.y += b * p->y_stride;
    if (p->where)
        rest.where += b * p->y_stride;
    return rest;
}

/* Products of rows [first, first + rows) of the operands, rows >= 1. The fields after n are working
 * state of linear.c and lookup.c. */
typedef struct bn_group {
    size_t first, rows;
    const bn_product *products;
    int n;
    int together;           /* number of products before the first that is stored as lines */
    size_t panels;          /* of these products */
    size_t columns, blocks; /* items of lookup.c: columns of tokens, blocks of panels */
    size_t done;            /* rows multiplied by lookup tables */
    size_t before;          /* items of a run that belong to earlier groups */
} bn_group;

/* The group, out of n, that an item of a run belongs to. */
static inline const bn_group *bn_group_of(const bn_group *groups, size_t n, size_t item) {
    while (n > 1) {
        const size_t half = n / 2;
        const int behind = groups[half].before <= item;
        groups += behind ? half : 0;
        n = behind ? n - half : half;
    }
    return groups;
}

/* The panels of a group's products form one list. Finds the product that contains panel *first of
 * the nonempty range [*first, end): returns it with its panels of the range, [*panel, *panel + *n),
 * and advances *first past them. */
static inline const bn_product *bn_next_part(const bn_product *p, size_t *first, size_t end,
                                             size_t *panel, size_t *n) {
    for (*panel = *first; *panel >= bn_panels(p->w); p++)
        *panel -= bn_panels(p->w);
    *n = bn_min(end - *first, bn_panels(p->w) - *panel);
    *first += *n;
    return p;
}

#endif
