/* SPDX-License-Identifier: MIT
 *
 * internal.h: what a model, a session and a forward pass are made of.
 *
 * Shape letters: B rows computed together, D dim, H query heads, G KV heads, E head_dim,
 * F ffn_dim, V vocab_size, C tokens the cache holds.
 */
#ifndef BITNET_INTERNAL_H
#define BITNET_INTERNAL_H

#include <stdatomic.h>

#include "bitnet_runtime.h"
#include "file.h"
#include "kernels.h"
#include "threads.h"

/* FORMAT.md §2 bounds every factor of a cache or a workspace so that no product reaches 2^62. */
#if SIZE_MAX < UINT64_MAX
#error "sizes of caches and workspaces need a size_t of 64 bits: compile for a 64-bit machine"
#endif

typedef struct bn_layer {
    const float *attn_norm, *q_norm, *k_norm, *attn_sub_norm, *attn_post_norm; /* gains or NULL */
    const float *ffn_norm, *ffn_sub_norm, *ffn_post_norm;
    bn_tensor q, k, v, o;     /* H·E × D, G·E × D, G·E × D, D × H·E */
    bn_tensor gate, up, down; /* F × D (gate: or none), F × D, D × F */
    size_t window;            /* keys a row sees; 0: all */
    uint32_t table;           /* which rope_frequencies: 1 in local layers */
} bn_layer;

struct bn_model {
    bn_mapping mapping;
    bn_file file;
    bn_config config;
    bn_kernels kernels;
    bn_pool *pool;
    bn_gate *gate;             /* act(gate) · up */
    int32_t grouped;           /* a matrix has a scale for every 128 columns */
    bn_layer *layers;          /* [n_layers] */
    bn_tensor embedding, head; /* V × D; the same tensor when tied; no data without a head */
    const float *final_norm;   /* [D] */
    const float *rope_frequencies[2]; /* [rope_dim/2] or NULL: of all layers, or global and local */
};

/* The KV cache of one text. Per layer and KV head, keys lie in tiles [slots/16][E][16 keys] and
 * values in rows [slots][E], so that both kernels of attention read one linear stream. BN_KV_INT8
 * has four dimensions of a key together, [slots/16][ceil(E/4)][16 keys][4], and scales. */
typedef struct bn_cache {
    uint8_t *k, *v;           /* [n_layers][G] heads of head_stride bytes */
    float *k_scale, *v_scale; /* [n_layers][G][slots], or NULL */
    size_t slots;             /* C rounded up to a tile */
    size_t head_stride;
    int32_t type; /* bn_kv_type */
} bn_cache;

/* One token to compute: which text it belongs to and where it stands in it. */
typedef struct bn_row {
    bn_cache *cache;
    int32_t token, position;
} bn_row;

/* Scratch memory for up to `batch` rows. */
typedef struct bn_workspace {
    bn_row *rows;        /* [B] */
    size_t batch;        /* B */
    size_t n_ctx;        /* tokens that `partial` has room for */
    size_t q_stride;     /* bytes of a row of q */
    size_t wide;         /* max(D, H·E, F) */
    float *x;            /* [B][D] the residual stream */
    float *h;            /* [B][wide] input of a linear, before quantization */
    int8_t *q;           /* [B][q_stride] and after */
    float *s;            /* [B] scale of q: q = round(h·s) */
    int32_t *q_sum;      /* [B] Σq */
    int32_t *group_sums; /* [B][group_sums_stride] Σq of each 128, if the model has such scales */
    size_t group_sums_stride;
    float *qkv;       /* [B][(H + 2G)·E] */
    float *gate, *up; /* [B][F] */
    float *y;         /* [B][D] a sublayer's output, when a norm comes before the addition */
    float *angle;     /* [2][B][rope_dim] cos and sin of each row's position, by table */
    int32_t *acc;     /* [threads][acc_stride]: [B][BN_CHUNK_ROWS], or of a block of lookup.c */
    size_t acc_stride;
    uint8_t *lookup; /* [threads][lookup_stride] scratch of ternary_lookup, or NULL */
    size_t lookup_stride;
    size_t lookup_rows; /* most of a block, in whole panels */
    float *attend;      /* [threads][attend_stride] */
    float *partial;     /* bn_partial_floats: results of chunks, when a context is split */
    uint64_t *skipped;  /* [threads] bytes of lines that were left out since the beginning */
    atomic_size_t *chunks_done; /* [G] how many are there */
    size_t attend_stride;
    void *memory; /* all of the above */
    size_t size;  /* its bytes */
} bn_workspace;

enum {
    BN_CHUNK_ROWS = 128,   /* output rows a thread computes at a time: the sums stay in cache */
    BN_LOOKUP_ROWS = 2560, /* the same by tables: their sums fill half of a usual second cache */
    BN_LOOKUP_LEAST_ROWS = 640, /* with fewer, making tables costs more than they save */
    BN_CHUNK_KEYS = 256 /* keys of an attention chunk; fixed, because it is part of the numbers */
};

/* What a session has of its last token: its hidden state, with it estimates of its logits, or they
 * themselves. */
enum { BN_READY_NOTHING, BN_READY_HIDDEN, BN_READY_ESTIMATES, BN_READY_LOGITS };

struct bn_session {
    bn_model *model;
    bn_cache cache;
    bn_workspace work;
    int32_t n_ctx, position;
    int32_t *tokens;     /* [C] */
    float *hidden;       /* [D] x of the last token, before the final norm */
    float *logits;       /* [V] of the last token, or estimates of them */
    int32_t ready;       /* which of these is there */
    float *pool;         /* [D] hidden states so far, as bn_session_embed pools them */
    int32_t pooled;      /* tokens in it */
    int32_t pooling;     /* and how */
    float *score_logits; /* [score_rows][V] */
    int32_t score_rows;
    void *sampler_scratch;
    uint8_t *screened; /* [V] scratch of bn_head_top */
    uint64_t rng;
    void *memory; /* all but the workspace */
    size_t memory_size;
    atomic_int cancelled; /* until the next rewind */
};

/* --- linear.c --- */

/* One product of a group that shares its input: y[b][r] = W·input, or x[b][r] += scale·(W·input).
 */
typedef struct bn_product {
    const bn_tensor *w;
    float *y;
    size_t y_stride;
    const float *where; /* NULL, or as y: of what is not > 0 here, y is not asked and may be 0 */
    int32_t accumulate; /* add to what y holds */
    float scale;        /* multiplies the product when accumulating */
} bn_product;

static inline size_t bn_panels(const bn_tensor *t) {
    return ((size_t)t->rows + BN_PANEL - 1) / BN_PANEL;
}

/* Compute up to 3 products of rows [first, first + rows) of the workspace's h, q, s, those with
 * lines after the others. All threads. */
void bn_linear(const bn_model *m, const bn_workspace *w, size_t first, size_t rows,
               const bn_product *products, int n_products);

/* x[0..D) = row `token` of the embedding, times the embedding scale. */
void bn_embed(const bn_model *m, int32_t token, float *x);

/* --- cache.c --- */

/* Bytes of the keys, or of the values, of n positions of one KV head. */
size_t bn_cache_bytes(const bn_config *c, int32_t type, size_t n);

/* And of their scales. */
size_t bn_cache_scale_bytes(int32_t type, size_t n);

/* Rotate q and k of the rows, append k and v to the caches of layer `layer`. */
void bn_cache_append(const bn_model *m, bn_workspace *w, size_t rows, const bn_layer *l,
                     uint32_t layer);

/* --- attention.c --- */

/* h[b] = softmax(q·Kᵀ·scale)·V over what each row may see. All threads. */
void bn_attention(const bn_model *m, bn_workspace *w, size_t rows, uint32_t layer);

/* Floats of a thread's share of workspace.attend. */
size_t bn_attend_floats(const bn_config *c);
/* Floats of workspace.partial. */
size_t bn_partial_floats(const bn_config *c, size_t n_ctx);

/* --- forward.c --- */

/* Run rows [0, rows) of the workspace through all layers; w->x holds the result and the caches
 * the rows' keys and values. Returns BN_ERR_NUMERIC when a row is not finite. */
bn_status bn_forward(bn_model *m, bn_workspace *w, size_t rows);

/* Norm and quantize rows [first, first + rows) of x for the head. Fails like bn_forward. */
bn_status bn_head_input(bn_model *m, bn_workspace *w, size_t first, size_t rows);

/* Logits of rows [first, first + rows) after bn_forward: out is [rows][V]. Fails like it. */
bn_status bn_head(bn_model *m, bn_workspace *w, size_t first, size_t rows, float *out);

/* --- generate.c --- */

/* What every call that takes tokens refuses before any work. */
bn_status bn_check_tokens(const bn_session *s, const int32_t *tokens, int32_t n);

/* --- head.c --- */

enum { BN_SCREEN_MOST = 256 }; /* tokens that bn_head_top can be asked for */

/* Whether the head has a sketch, and nothing is added to its logits: what the next two ask for. */
int bn_head_screens(const bn_model *m);

/* Logits of the first rows as the sketch has them, after bn_head_input: [rows][V]. */
void bn_head_estimate(const bn_model *m, const bn_workspace *w, size_t rows, float *logits);

/* Of row 0, after bn_head_input: estimates become the k largest logits, and those of n tokens
 * more, exactly; whatever can be neither becomes -INFINITY. k >= 1, k + n <= BN_SCREEN_MOST.
 * done: scratch, one byte a token. */
void bn_head_top(const bn_model *m, const bn_workspace *w, size_t k, const int32_t *more, size_t n,
                 float *logits, uint8_t *done);

/* --- workspace.c --- */

/* The memory it takes, which grows with both. */
size_t bn_workspace_size(const bn_model *m, size_t batch, size_t n_ctx);
bn_status bn_workspace_new(const bn_model *m, size_t batch, size_t n_ctx, bn_workspace *w);
void bn_workspace_free(bn_workspace *w);

/* --- math.c: the same bits on every machine, unlike the C library's --- */

void bn_sincos(double x, double *sine,
               double *cosine); /* error below 1e-8; NaN unless |x| < 2^24 */
double bn_log(double x);        /* x normal and > 0 */

#endif
