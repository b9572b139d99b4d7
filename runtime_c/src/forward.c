/* SPDX-License-Identifier: MIT
 *
 * forward.c: the transformer, top to bottom. Read this first.
 *
 *     x = embedding[token]
 *     for each layer:
 *         x += o( sub_norm( attention( rope(q), rope(k), v )))     q, k, v of norm(x)
 *         x += down( sub_norm( act(gate) · up ))                   gate, up of norm(x)
 *     logits = head( norm(x) )
 *
 * Behind relu² most of act(gate) is 0: a matrix that is stored for it (lines.c) is read only where
 * that matters, up where the gate is positive, down for the inputs that are not 0.
 *
 * Some models have a norm of its own before each linear, or one more before each addition to x, or
 * no gate, or no head.
 *
 * A row is one token; rows of one call may belong to a prompt or to different texts. Before
 * each ternary linear the rows are quantized to int8, one scale a row (bitnet/quant.py). One
 * row is normed and quantized by the caller alone: waking the other threads costs more.
 */
#include <math.h>
#include <string.h>

#include "internal.h"
#include "tiles.h"

typedef struct pass {
    const bn_model *m;
    bn_workspace *w;
    const bn_layer *l;
    const float *source; /* [B][source_stride] what is to be normed */
    size_t source_stride, width;
    const float *gain, *linear_gain; /* NULL: no norm here */
    size_t first, rows;
    atomic_int not_finite;
} pass;

typedef void (*row_step)(pass *p, size_t row);

typedef struct row_job {
    pass *p;
    row_step step;
} row_job;

static void run_rows(void *context, int32_t thread, size_t first, size_t end) {
    const row_job *job = context;
    (void)thread;
    for (size_t row = first; row < end; row++)
        job->step(job->p, job->p->first + row);
}

static void each_row(pass *p, row_step step) {
    row_job job = {p, step};
    if (p->rows == 1)
        run_rows(&job, 0, 0, 1);
    else
        bn_pool_run(p->m->pool, p->rows, p->rows, run_rows, &job);
}

/* cos and sin of each angle at this position. */
static void turn(const bn_config *c, const float *frequencies, int32_t position, float *angle) {
    for (size_t i = 0; i < c->rope_dim / 2; i++) {
        double sine, cosine;
        bn_sincos((double)((float)position * frequencies[i]), &sine, &cosine);
        angle[2 * i] = (float)cosine * c->rope_attention_factor;
        angle[2 * i + 1] = (float)sine * c->rope_attention_factor;
    }
}

/* x = embedding; cos and sin of the position, for every layer. */
static void embed_row(pass *p, size_t row) {
    const bn_config *c = &p->m->config;
    const bn_row *r = &p->w->rows[row];
    bn_embed(p->m, r->token, p->w->x + row * c->dim);
    for (size_t table = 0; table < 2; table++)
        if (p->m->rope_frequencies[table])
            turn(c, p->m->rope_frequencies[table], r->position,
                 p->w->angle + (table * p->w->batch + row) * c->rope_dim);
}

static void norm_row(pass *p, float *y, const float *x, const float *gain, size_t n) {
    const float sum = p->m->kernels.rms_norm(y, x, gain, n, p->m->config.norm_eps);
    if (!isfinite(sum))
        atomic_store_explicit(&p->not_finite, 1, memory_order_relaxed);
}

/* h = linear_norm(norm(source)), q = quantize(h). The scale of what is not finite is NaN or 0. */
static void quantize_row(pass *p, size_t row) {
    const bn_workspace *w = p->w;
    const float *source = p->source + row * p->source_stride;
    float *h = w->h + row * w->wide;
    if (p->gain)
        norm_row(p, h, source, p->gain, p->width);
    else if (h != source)
        memcpy(h, source, p->width * sizeof *h);
    if (p->linear_gain)
        norm_row(p, h, h, p->linear_gain, p->width);
    w->s[row] = p->m->kernels.quantize(w->q + row * w->q_stride, &w->q_sum[row], h, p->width,
                                       bn_q_row(p->width));
    if (!(w->s[row] > 0))
        atomic_store_explicit(&p->not_finite, 1, memory_order_relaxed);
    if (p->m->grouped)
        bn_sum_groups(w, row, p->width);
}

static void norm_quantize(pass *p, const float *source, size_t stride, size_t width,
                          const float *gain, const float *linear_gain) {
    p->source = source, p->source_stride = stride, p->width = width;
    p->gain = gain, p->linear_gain = linear_gain;
    each_row(p, quantize_row);
}

/* Products of norm(x). Those with a norm of their own before them take turns. */
static void project(pass *p, const float *gain, const bn_product *products, int n) {
    const size_t D = p->m->config.dim;
    const int together = products->w->norm ? 1 : n;
    for (int i = 0; i < n; i += together) {
        norm_quantize(p, p->w->x, D, D, gain, products[i].w->norm);
        bn_linear(p->m, p->w, 0, p->rows, products + i, together);
    }
}

/* h = sub_norm(act(gate) · up), quantized. Without a gate, up was put in its place. */
static void gate_row(pass *p, size_t row) {
    const bn_workspace *w = p->w;
    const size_t F = p->m->config.ffn_dim;
    float *up = w->up + row * F;
    for (size_t i = 0; i < F && !p->l->gate.data; i++)
        up[i] = 1;
    p->m->gate(w->h + row * w->wide, w->gate + row * F, up, F);
    quantize_row(p, row);
}

/* x += norm(y) */
static void post_norm_row(pass *p, size_t row) {
    const bn_config *c = &p->m->config;
    float *y = p->w->y + row * c->dim, *x = p->w->x + row * c->dim;
    norm_row(p, y, y, p->gain, c->dim);
    for (size_t i = 0; i < c->dim; i++)
        x[i] += y[i] * c->residual_scale;
}

/* x += W·h, with a norm in between if the model has one. */
static void residual(pass *p, const bn_tensor *linear, const float *post_norm) {
    bn_workspace *w = p->w;
    const bn_config *c = &p->m->config;
    const bn_product product = {.w = linear,
                                .y = post_norm ? w->y : w->x,
                                .y_stride = c->dim,
                                .accumulate = !post_norm,
                                .scale = c->residual_scale};
    bn_linear(p->m, w, p->first, p->rows, &product, 1);
    if (post_norm) {
        p->gain = post_norm;
        each_row(p, post_norm_row);
    }
}

bn_status bn_forward(bn_model *m, bn_workspace *w, size_t rows) {
    const bn_config *c = &m->config;
    const size_t F = c->ffn_dim, E = c->head_dim, HE = c->n_heads * E;
    const size_t GE = c->n_kv_heads * E, QKV = HE + 2 * GE;
    /* what multiplies up is 0 where the gate is not positive */
    const int positive = c->activation == BN_ACT_RELU2 || c->activation == BN_ACT_RELU;
    pass p = {.m = m, .w = w, .rows = rows};

    each_row(&p, embed_row);
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        const bn_layer *l = p.l = &m->layers[layer];

        /* attention */
        const bn_product qkv[3] = {{.w = &l->q, .y = w->qkv, .y_stride = QKV},
                                   {.w = &l->k, .y = w->qkv + HE, .y_stride = QKV},
                                   {.w = &l->v, .y = w->qkv + HE + GE, .y_stride = QKV}};
        project(&p, l->attn_norm, qkv, 3);
        bn_cache_append(m, w, rows, l, layer);
        bn_attention(m, w, rows, layer);
        norm_quantize(&p, w->h, w->wide, HE, l->attn_sub_norm, l->o.norm);
        residual(&p, &l->o, l->attn_post_norm);

        /* feed-forward */
        const bn_product gate_up[2] = {
            {.w = &l->gate, .y = w->gate, .y_stride = F},
            {.w = &l->up, .y = w->up, .y_stride = F, .where = positive ? w->gate : NULL}};
        const bn_product up_alone = {.w = &l->up, .y = w->gate, .y_stride = F};
        if (l->gate.data)
            project(&p, l->ffn_norm, gate_up, 2);
        else
            project(&p, l->ffn_norm, &up_alone, 1);
        p.source = w->h, p.source_stride = w->wide, p.width = F;
        p.gain = l->ffn_sub_norm, p.linear_gain = l->down.norm;
        each_row(&p, gate_row);
        residual(&p, &l->down, l->ffn_post_norm);
    }
    return p.not_finite ? BN_ERR_NUMERIC : BN_OK;
}

bn_status bn_head_input(bn_model *m, bn_workspace *w, size_t first, size_t rows) {
    const size_t D = m->config.dim;
    pass p = {.m = m, .w = w, .first = first, .rows = rows};
    norm_quantize(&p, w->x, D, D, m->final_norm, NULL);
    return p.not_finite ? BN_ERR_NUMERIC : BN_OK;
}

bn_status bn_head(bn_model *m, bn_workspace *w, size_t first, size_t rows, float *out) {
    const bn_config *c = &m->config;
    const size_t V = c->vocab_size;
    const bn_status status = bn_head_input(m, w, first, rows);
    const bn_product logits = {.w = &m->head, .y = out, .y_stride = V};
    if (status)
        return status;
    bn_linear(m, w, first, rows, &logits, 1);
    if (c->logit_softcap > 0)
        for (size_t i = 0; i < rows * V; i++) {
            const float e = bn_exp(out[i] / c->logit_softcap * 2);
            out[i] = c->logit_softcap * (1 - 2 / (e + 1));
        }
    return BN_OK;
}
