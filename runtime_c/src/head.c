/* SPDX-License-Identifier: MIT
 *
 * head.c: the largest logits without reading the whole head, the largest matrix of the model.
 *
 * The high plane alone (FORMAT.md §4, half of the bytes) gives every logit but for
 *     e = (Σ lo·q - 7.5·Σq)·σ/s,   lo in 0..15.
 * What is left of a weight after its high half behaves like noise, uniform with deviation
 * LOW_DEVIATION, so e has deviation LOW_DEVIATION·|q|·σ/s. A logit that is SIGMAS of these below
 * the k-th largest is out; the rest are computed in full. A row would have to line up its low
 * halves with q to break this, with a chance below 1e-11 a token for halves that are noise; the
 * bound that holds for any halves is 50 times wider and rules out nothing.
 *
 * Work goes by panels of 16 rows, because they share their memory lines.
 */
#include <math.h>
#include <string.h>

#include "internal.h"

#define LOW_MEAN 7.5f
#define LOW_DEVIATION 4.61f /* sqrt((16² - 1)/12) */
#define SIGMAS 7.0f

typedef struct screen {
    const bn_model *m;
    const bn_workspace *w;
    bn_product product; /* into the row of logits */
    uint8_t *done;      /* [panels] 1: the panel's logits are exact */
    float noise;        /* deviation of e, without σ */
    float bar;          /* no logit below it is among the k largest */
} screen;

enum { CHUNK_PANELS = BN_CHUNK_ROWS / BN_PANEL };

/* logits = what the high plane says */
static void estimate(void *context, int32_t thread, size_t panel, size_t end) {
    const screen *c = context;
    const bn_tensor *t = &c->m->head;
    const size_t k_tiles = ((size_t)t->cols + BN_INT8_TILE_K - 1) / BN_INT8_TILE_K;
    int32_t *acc = c->w->acc + (size_t)thread * c->w->acc_stride;
    const float mean = (128 - LOW_MEAN) * (float)c->w->q_sum[0];
    c->m->kernels.int8_high(&(bn_matmul){.acc = acc,
                                         .acc_stride = BN_CHUNK_ROWS,
                                         .tiles = t->data + panel * k_tiles * BN_TILE_BYTES,
                                         .panel_stride = k_tiles * BN_TILE_BYTES,
                                         .panels = end - panel,
                                         .k_tiles = k_tiles,
                                         .q = c->w->q,
                                         .q_stride = c->w->q_stride,
                                         .tokens = 1});
    for (size_t r = panel * BN_PANEL, i = 0; r < end * BN_PANEL && r < t->rows; r++, i++)
        c->product.y[r] = ((float)acc[i] - mean) * (t->scales[r] / c->w->s[0]);
    memset(c->done + panel, 0, end - panel);
}

static void complete(const screen *c, size_t panel, int32_t thread) {
    bn_linear_panels(c->m, c->w, &c->product, panel, 1, thread);
    c->done[panel] = 1;
}

/* Compute in full what may pass the bar, rule out the rest. */
static void sift(void *context, int32_t thread, size_t panel, size_t end) {
    const screen *c = context;
    const bn_tensor *t = &c->m->head;
    for (; panel < end; panel++) {
        if (c->done[panel])
            continue;
        const size_t begin = panel * BN_PANEL;
        const size_t stop = begin + BN_PANEL < t->rows ? begin + BN_PANEL : t->rows;
        int passes = 0;
        for (size_t r = begin; r < stop; r++)
            passes |= !(c->product.y[r] + SIGMAS * c->noise * t->scales[r] < c->bar);
        if (passes)
            complete(c, panel, thread);
        else
            for (size_t r = begin; r < stop; r++)
                c->product.y[r] = -INFINITY;
    }
}

/* Tokens of the k largest estimates, any order; blocks that hold none are skipped. */
static size_t largest(const bn_kernels *kernels, const float *x, size_t V, size_t k, size_t *top) {
    enum { BLOCK = 128 };
    size_t n = 0;
    float last = -INFINITY;
    for (size_t first = 0; first < V; first += BLOCK) {
        const size_t size = V - first < BLOCK ? V - first : BLOCK;
        if (n == k && !(kernels->max(x + first, size) > last))
            continue;
        for (size_t i = first; i < first + size; i++) {
            if (n == k && !(x[i] > last))
                continue;
            size_t at = n < k ? n++ : k - 1;
            for (; at > 0 && x[top[at - 1]] < x[i]; at--)
                top[at] = top[at - 1];
            top[at] = i;
            last = x[top[n - 1]];
        }
    }
    return n;
}

int bn_head_screens(const bn_model *m) {
    enum { LARGE = 8192 }; /* tokens; below, reading the whole head is as good */
    return m->head.encoding == BN_INT8_PLANES && !m->head.bias && m->config.logit_softcap == 0 &&
           m->config.vocab_size >= LARGE;
}

bn_status bn_head_top(bn_model *m, bn_workspace *w, size_t k, const int32_t *more, size_t n,
                      float *logits, uint8_t *done) {
    size_t top[BN_SCREEN_MOST];
    const bn_status status = bn_head_input(m, w, 0, 1);
    if (status)
        return status;
    int32_t squares = 0;
    for (size_t i = 0; i < m->config.dim; i++)
        squares += w->q[i] * w->q[i];
    screen c = {.m = m,
                .w = w,
                .product = {.w = &m->head, .y = logits, .y_stride = m->config.vocab_size},
                .done = done,
                .noise = LOW_DEVIATION * sqrtf((float)squares) / w->s[0],
                .bar = INFINITY};
    bn_pool_run(m->pool, bn_panels(&m->head), CHUNK_PANELS, estimate, &c);

    /* k + n of the largest estimates, in full, give a bar that the (k + n)-th largest passes */
    const size_t found = largest(&m->kernels, logits, m->config.vocab_size, k + n, top);
    for (size_t i = 0; i < found; i++)
        if (!done[top[i] / BN_PANEL])
            complete(&c, top[i] / BN_PANEL, 0);
    for (size_t i = 0; i < found; i++)
        c.bar = logits[top[i]] < c.bar ? logits[top[i]] : c.bar;
    for (size_t i = 0; i < n; i++)
        if (!done[(size_t)more[i] / BN_PANEL])
            complete(&c, (size_t)more[i] / BN_PANEL, 0);
    bn_pool_run(m->pool, bn_panels(&m->head), CHUNK_PANELS, sift, &c);
    return BN_OK;
}
