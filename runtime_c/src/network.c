/* SPDX-License-Identifier: MIT
 *
 * network.c: see network.h.
 *
 * After relu² most of act(gate) is 0. Matrices in an encoding for this (lines.c) are read only
 * where needed: up where the gate is positive, down for inputs that are not 0.
 */
#include "network.h"

#include "pass.h"

static bn_network read_network(const bn_file *f, uint32_t stack, uint32_t layer, uint32_t expert) {
    return (bn_network){
        .sub_norm = bn_norm_of_expert(f, stack, layer, BN_FFN_SUB_NORM, expert),
        .gate = bn_file_tensor(f, stack, layer, BN_GATE, expert),
        .up = bn_file_tensor(f, stack, layer, BN_UP, expert),
        .down = bn_file_tensor(f, stack, layer, BN_DOWN, expert),
    };
}

static bn_gate *act_of(const bn_config *c, const bn_kernels *kernels) {
    bn_gate *const acts[] = {[BN_ACT_RELU2] = kernels->vectors.relu2_gate,
                             [BN_ACT_SILU] = kernels->vectors.silu_gate,
                             [BN_ACT_GELU] = kernels->vectors.gelu_gate,
                             [BN_ACT_RELU] = kernels->vectors.relu_gate,
                             [BN_ACT_GELU_ERF] = kernels->vectors.gelu_erf_gate};
    return acts[c->activation];
}

bn_ffn bn_ffn_read(const bn_file *f, uint32_t stack, uint32_t layer, const bn_kernels *kernels,
                   bn_network *networks) {
    const bn_config *c = &f->stacks[stack];
    for (uint32_t i = 0; i < bn_ffn_networks(c); i++)
        networks[i] = read_network(f, stack, layer, c->n_experts > 0 ? i : BN_NO_EXPERT);
    return (bn_ffn){
        .kind = c->ffn,
        .norm = bn_norm_read(f, stack, layer, BN_FFN_NORM),
        .post_norm = bn_norm_read(f, stack, layer, BN_FFN_POST_NORM),
        .act = act_of(c, kernels),
        .rectifies = c->activation == BN_ACT_RELU2 || c->activation == BN_ACT_RELU,
        .choice = {c->n_experts, c->experts_per_token, (int32_t)c->normalize_routing},
        .router = bn_file_tensor(f, stack, layer, BN_ROUTER, BN_NO_EXPERT),
        .networks = networks,
    };
}

bn_ffn bn_ffn_of_pool(const bn_file *f, uint32_t stack, const bn_kernels *kernels,
                      bn_network *network) {
    network->up = bn_file_tensor(f, stack, BN_NO_LAYER, BN_POOL_UP, BN_NO_EXPERT);
    network->down = bn_file_tensor(f, stack, BN_NO_LAYER, BN_POOL_DOWN, BN_NO_EXPERT);
    return (bn_ffn){.kind = BN_FFN_PLAIN,
                    .norm = bn_norm_read(f, stack, BN_NO_LAYER, BN_POOL_NORM),
                    .act = act_of(&f->stacks[stack], kernels),
                    .networks = network};
}

typedef struct activation {
    bn_pass *p;
    const bn_ffn *ffn;
    const uint32_t *network;
} activation;

static const bn_network *network_of(const activation *a, size_t row) {
    return &a->ffn->networks[a->network ? a->network[row] : 0];
}

/* Place of a row's input of down: its own, or that of the task's first row as scratch. */
static float *place_of(const activation *a, size_t row, size_t first) {
    const bn_operands *in = &a->p->w->in;
    return in->h + (bn_keeps_h(a->p, &network_of(a, row)->down) ? row : first) * in->wide;
}

static void finish_row(const activation *a, size_t row, const float *h) {
    const bn_network *network = network_of(a, row);
    bn_quantize_rows(a->p, row, 1, &network->sub_norm, h, 0, a->p->stack->config.ffn_dim,
                     &network->down);
}

/* h = act(gate) · up */
static void gated_rows(void *context, int32_t thread, size_t first, size_t end) {
    const activation *a = context;
    const size_t F = a->p->stack->config.ffn_dim, stride = bn_row_stride(F);
    (void)thread;
    for (size_t row = first; row < end; row++) {
        float *h = place_of(a, row, first);
        a->ffn->act(h, a->p->w->gate + row * stride, a->p->w->up + row * stride, F);
        finish_row(a, row, h);
    }
}

/* h = act(up). The kernels compute act(g) · u: here u = 1. */
static void plain_rows(void *context, int32_t thread, size_t first, size_t end) {
    enum { PIECE = 1024 };
    const activation *a = context;
    const size_t F = a->p->stack->config.ffn_dim, stride = bn_row_stride(F);
    float ones[PIECE];
    (void)thread;
    for (size_t i = 0; i < PIECE; i++)
        ones[i] = 1;
    for (size_t row = first; row < end; row++) {
        float *h = place_of(a, row, first);
        for (size_t i = 0; i < F; i += PIECE)
            a->ffn->act(h + i, a->p->w->up + row * stride + i, ones, bn_min(F - i, PIECE));
        finish_row(a, row, h);
    }
}

void bn_ffn_activate(bn_pass *p, const bn_ffn *ffn, const uint32_t *network) {
    bn_each_row(p, ffn->kind == BN_FFN_GATED ? gated_rows : plain_rows,
                &(activation){p, ffn, network});
}

int bn_ffn_products(const bn_pass *p, const bn_ffn *ffn, const bn_network *network, size_t row,
                    bn_product products[2]) {
    const size_t stride = bn_row_stride(p->stack->config.ffn_dim);
    float *gate = p->w->gate + row * stride;
    const int is_gated = ffn->kind == BN_FFN_GATED;
    if (is_gated)
        *products++ = (bn_product){.w = &network->gate, .y = gate, .y_stride = stride};
    *products = (bn_product){.w = &network->up,
                             .y = p->w->up + row * stride,
                             .y_stride = stride,
                             .where = is_gated && ffn->rectifies ? gate : NULL};
    return 1 + is_gated;
}
