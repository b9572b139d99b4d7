/* SPDX-License-Identifier: MIT
 *
 * probe.c: see probe.h. Built from the steps of other layers.
 */
#include "probe.h"

#include <string.h>

#include "attention.h"
#include "cache.h"
#include "feed_forward.h"
#include "forward.h"
#include "pass.h"

/* Store keys and values of the states in the caches. */
static void remember(bn_pass *p, const bn_layer *l) {
    const size_t HE = (size_t)p->stack->config.n_heads * p->stack->config.head_dim;
    const bn_product kv[] = {{.w = &l->k, .y = p->w->kv, .y_stride = bn_row_stride(2 * HE)},
                             {.w = &l->v, .y = p->w->kv + HE, .y_stride = bn_row_stride(2 * HE)}};
    bn_project(p, &l->attn_norm, kv, 2); /* after the final norm */
    bn_cache_append(p, l);
}

/* Row i becomes the query of image i; the mask lets it see the whole image from any position. */
static void place_probes(bn_pass *p, const float *probe, size_t each) {
    const size_t D = p->stack->config.dim, stride = bn_row_stride(D);
    for (size_t i = 0; i < p->rows; i++) {
        p->w->rows[i] = (bn_row){.cache = p->w->rows[i * each].cache};
        memcpy(p->w->x + i * stride, probe, D * sizeof *probe);
    }
}

bn_status bn_probe(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t images,
                   size_t each) {
    const bn_layer *l = stack->pooling->layers;
    const bn_config *c = &stack->pooling->config;
    const size_t D = c->dim, stride = bn_row_stride(D), HE = (size_t)c->n_heads * c->head_dim;
    const bn_product q = {.w = &l->q, .y = w->q, .y_stride = bn_row_stride(HE)};
    const bn_norm none = {0};
    bn_pass states = {.m = m, .stack = stack->pooling, .w = w, .rows = images * each};
    bn_pass p = {.m = m, .stack = stack->pooling, .w = w, .rows = images};

    bn_each_piece(&states, l, remember);
    place_probes(&p, stack->probe, each);
    bn_project(&p, &none, &q, 1);
    bn_attention(&p, l);
    memset(w->x, 0, images * stride * sizeof *w->x);
    bn_quantize_h(&p, &none, HE, &l->o);
    bn_add(&p, &l->o, &none);
    bn_feed_forward(&p, &l->ffn);
    for (size_t i = 0; i < images; i++)
        memcpy(w->in.h + i * w->in.wide, w->x + i * stride, D * sizeof *w->x);
    return states.not_finite || p.not_finite ? BN_ERR_NUMERIC : BN_OK;
}
