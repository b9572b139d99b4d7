/* SPDX-License-Identifier: MIT
 *
 * feed_forward.c: see feed_forward.h.
 *
 * Behind relu² most of act(gate) is 0: a matrix that is stored for it (lines.c) is read only where
 * that matters, up where the gate is positive, down for the inputs that are not 0.
 */
#include "feed_forward.h"

#include "pass.h"

bn_ffn bn_ffn_read(const bn_file *f, uint32_t stack, uint32_t layer, const bn_kernels *kernels) {
    const bn_config *c = &f->stacks[stack];
    bn_gate *const acts[] = {[BN_ACT_RELU2] = kernels->vectors.relu2_gate,
                             [BN_ACT_SILU] = kernels->vectors.silu_gate,
                             [BN_ACT_GELU] = kernels->vectors.gelu_gate,
                             [BN_ACT_RELU] = kernels->vectors.relu_gate};
    return (bn_ffn){
        .kind = c->ffn,
        .norm = bn_norm_read(f, stack, layer, BN_FFN_NORM),
        .sub_norm = bn_norm_read(f, stack, layer, BN_FFN_SUB_NORM),
        .post_norm = bn_norm_read(f, stack, layer, BN_FFN_POST_NORM),
        .gate = bn_file_tensor(f, stack, layer, BN_GATE, BN_NO_EXPERT),
        .up = bn_file_tensor(f, stack, layer, BN_UP, BN_NO_EXPERT),
        .down = bn_file_tensor(f, stack, layer, BN_DOWN, BN_NO_EXPERT),
        .act = acts[c->activation],
        .rectifies = c->activation == BN_ACT_RELU2 || c->activation == BN_ACT_RELU,
    };
}

/* [B][F] of what gate gives, and behind it the same of up. */
static size_t gate_floats(const bn_config *c, size_t batch) {
    return (batch * c->ffn_dim + BN_LANES - 1) / BN_LANES * BN_LANES;
}

size_t bn_ffn_floats(const bn_config *c, size_t batch) {
    return gate_floats(c, batch) + batch * c->ffn_dim;
}

static float *gate_of(const bn_pass *p) {
    return p->w->ffn;
}

static float *up_of(const bn_pass *p) {
    return p->w->ffn + gate_floats(&p->stack->config, p->w->batch);
}

typedef struct activation {
    bn_pass *p;
    const bn_ffn *ffn;
} activation;

/* h = act(gate) · up, then as input of down. */
static void gated_rows(void *context, int32_t thread, size_t first, size_t end) {
    const activation *a = context;
    const bn_workspace *w = a->p->w;
    const size_t F = a->p->stack->config.ffn_dim;
    (void)thread;
    for (size_t row = first; row < end; row++) {
        float *h = w->in.h + row * w->in.wide;
        a->ffn->act(h, gate_of(a->p) + row * F, up_of(a->p) + row * F, F);
        bn_quantize_row(a->p, row, &a->ffn->sub_norm, h, F, &a->ffn->down);
    }
}

/* h = act(up), then as input of down. The kernels multiply with something: here with 1. */
static void plain_rows(void *context, int32_t thread, size_t first, size_t end) {
    enum { PIECE = 256 };
    const activation *a = context;
    const bn_workspace *w = a->p->w;
    const size_t F = a->p->stack->config.ffn_dim;
    float ones[PIECE];
    (void)thread;
    for (size_t i = 0; i < PIECE; i++)
        ones[i] = 1;
    for (size_t row = first; row < end; row++) {
        float *h = w->in.h + row * w->in.wide;
        for (size_t i = 0; i < F; i += PIECE)
            a->ffn->act(h + i, up_of(a->p) + row * F + i, ones, F - i < PIECE ? F - i : PIECE);
        bn_quantize_row(a->p, row, &a->ffn->sub_norm, h, F, &a->ffn->down);
    }
}

static void gated(bn_pass *p, const bn_ffn *ffn) {
    const size_t F = p->stack->config.ffn_dim;
    const float *where = ffn->rectifies ? gate_of(p) : NULL;
    const bn_product gate_up[] = {{.w = &ffn->gate, .y = gate_of(p), .y_stride = F},
                                  {.w = &ffn->up, .y = up_of(p), .y_stride = F, .where = where}};
    bn_project(p, &ffn->norm, gate_up, 2);
    bn_each_row(p, gated_rows, &(activation){p, ffn});
}

static void plain(bn_pass *p, const bn_ffn *ffn) {
    const bn_product up = {.w = &ffn->up, .y = up_of(p), .y_stride = p->stack->config.ffn_dim};
    bn_project(p, &ffn->norm, &up, 1);
    bn_each_row(p, plain_rows, &(activation){p, ffn});
}

void bn_feed_forward(bn_pass *p, const bn_ffn *ffn) {
    if (ffn->kind == BN_FFN_GATED)
        gated(p, ffn);
    else
        plain(p, ffn);
    bn_add(p, &ffn->down, &ffn->post_norm);
}
