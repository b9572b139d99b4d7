/* SPDX-License-Identifier: MIT
 *
 * chunk.h: attention of one block of queries to one chunk of keys, and merging of chunks.
 */
#ifndef BITNET_CHUNK_H
#define BITNET_CHUNK_H

#include "cache.h"
#include "mask.h"
#include "model.h"

/* The queries of `rows` consecutive positions of one text for one KV head: n = rows · group, row by
 * row. */
typedef struct bn_block {
    const bn_model *m;
    const bn_config *config; /* of the stack */
    bn_kv_head kv;
    int32_t type; /* bn_kv_type */
    size_t rows, group;
    size_t position;     /* of the first row */
    bn_mask mask;        /* of the layer and the text */
    float *q;            /* [n][E], times the attention scale, for types with float keys */
    int8_t *codes;       /* [n][bn_q_row(E)] for other types: the query is code · q_scale */
    float *q_scale;      /* [n] */
    float *scores;       /* [n][BN_CHUNK_KEYS] scratch */
    float *weight_scale; /* [n] scales of integer attention weights */
} bn_block;

/* For keys [begin, end) of one chunk and each query: m[n] the largest score, l[n] the sum of
 * exp(score - m), o[n][E] the sum of values with these weights. A row that sees none of the keys
 * gets l = 0. */
void bn_chunk_attend(const bn_block *b, size_t begin, size_t end, float *m, float *l, float *o);

/* Merge (m2, l2, o2) of one query into the running (m, l, o); l == 0 means nothing seen yet. */
void bn_chunk_merge(float *m, float *l, float *o, float m2, float l2, const float *o2, size_t E);

/* out[E] = o / l */
void bn_chunk_finish(float *out, const float *o, float l, size_t E);

#endif
