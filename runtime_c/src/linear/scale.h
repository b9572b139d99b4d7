/* SPDX-License-Identifier: MIT
 *
 * scale.h: conversion of a product's integer sums to floats, shared by all encodings and tiers.
 */
#ifndef BITNET_SCALE_H
#define BITNET_SCALE_H

#include "operands.h"

/* Number of matrix rows in n panels from row r0 on; the last panel may be partial. */
static inline size_t bn_rows_of(const bn_tensor *t, size_t r0, size_t n) {
    return bn_min(n * BN_PANEL, t->rows - r0);
}

/* Writes n values to outputs r0, r0 + 1, ... of row b, plus bias, or accumulates them. `value` is
 * overwritten. */
void bn_emit(const bn_operands *o, const bn_product *p, size_t b, size_t r0, size_t n,
             float *value);

/* How codes are stored: as T, or as T + 1. */
typedef enum bn_codes { BN_AS_THEY_ARE, BN_ONE_MORE } bn_codes;

/* Scaling of the sums acc, with acc_stride between rows, to outputs [r0, r0 + n) of all rows. */
bn_scaling bn_scaling_of(const bn_input *in, const bn_product *p, const int32_t *acc,
                         size_t acc_stride, bn_codes codes, size_t r0, size_t n);

/* The same, carried out. */
void bn_scale_sums(const bn_input *in, const bn_product *p, const int32_t *acc, size_t acc_stride,
                   bn_codes codes, size_t r0, size_t n);

#endif
