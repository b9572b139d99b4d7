/* SPDX-License-Identifier: MIT
 *
 * screen.c: finds the logits that matter without reading the whole head, the largest matrix of the
 * model.
 *
 * The sketch (FORMAT.md §4, a quarter of the bytes) gives every logit up to an error
 *     e = Σ (c - (s - 1.5)·t)·q·σ/s_q,
 * with q and 1/s_q the codes and the scale of the activations. The residual of a weight behaves
 * like noise of standard deviation d, so e has the deviation d·|q|·σ/s_q. A token SIGMAS of these
 * below the k-th largest logit is ruled out; the others are computed from their codes. For a token
 * drawn by its own noise, the same bound gives its earliest possible arrival; if that is after the
 * arrival of a known token, it is ruled out.
 *
 * In a sample, the likeliest tokens, e is measured; if it is larger than expected, because large q
 * meet columns that the sketch clips, all deviations are scaled up accordingly. The bound fails
 * only if the residual of a row is aligned with q, with a chance below 1e-11 per token if it is
 * noise. In four models trained by this project, no logit was more than 4 such deviations above its
 * estimate (1,024 tokens of text, 1,000 to 4,000 logits each).
 */
#include "screen.h"

#include <math.h>
#include <string.h>

#include "kernels/elementary.h"
#include "linear/rows.h"
#include "linear/sketch.h"
#include "linear/tiles.h"

#define SIGMAS 7.0f
#define ROUNDING 0.01f /* added to d: exceeds all float rounding errors */

enum { SIFT = 1024, SAMPLE = 64 /* tokens */ };

typedef struct sketch {
    const bn_model *m;
    const bn_tensor *head;
    const bn_workspace *w;
    const uint8_t *tiles;
    const float *step, *deviation; /* [V] */
    float *logits;                 /* [rows][V] */
    size_t rows;
} sketch;

static sketch sketch_of(const bn_model *m, const bn_stack *stack, const bn_workspace *w,
                        size_t rows, float *logits) {
    const bn_tensor *t = &stack->head;
    const bn_sketch_parts at = bn_sketch_at(t->rows, t->cols);
    return (sketch){.m = m,
                    .head = t,
                    .w = w,
                    .tiles = t->data + at.tiles,
                    .step = (const float *)(const void *)(t->data + at.step),
                    .deviation = (const float *)(const void *)(t->data + at.deviation),
                    .logits = logits,
                    .rows = rows};
}

static void estimate(void *context, int32_t thread, size_t panel, size_t end) {
    const sketch *c = context;
    const bn_workspace *w = c->w;
    const bn_tensor *t = c->head;
    const size_t first = panel * BN_PANEL;
    const size_t stop = bn_min(end * BN_PANEL, t->rows);
    int32_t *acc = w->in.scratch.acc + (size_t)thread * w->in.scratch.acc_stride;
    const bn_input in = {&w->in, 0, c->rows};
    bn_matmul mm = bn_tiles_of(&in, t, BN_TERNARY_TILE_K, panel, end - panel, acc);
    mm.tiles = c->tiles + panel * mm.panel_stride;
    c->m->kernels.products.sketch_matmul(&mm);
    for (size_t b = 0; b < c->rows; b++, acc += BN_CHUNK_ROWS)
        c->m->kernels.vectors.estimate(&(bn_estimates){.y = c->logits + b * t->rows + first,
                                                       .acc = acc,
                                                       .step = c->step + first,
                                                       .scales = t->scales + first,
                                                       .mean = 1.5f * (float)w->in.q_sum[b],
                                                       .unit = 1 / w->in.s[b],
                                                       .n = stop - first});
}

void bn_head_estimate(const bn_model *m, const bn_stack *stack, const bn_workspace *w, size_t rows,
                      size_t width, float *logits) {
    sketch c = sketch_of(m, stack, w, rows, logits);
    bn_pool_run(w->in.pool, bn_div_up(width, BN_PANEL), BN_CHUNK_PANELS, estimate, &c);
}

typedef struct screen {
    sketch of;
    float noise; /* of e, without the factors d and σ */
    float bar;   /* no logit below it is among the wanted largest */
    const bn_draw *draw;
    float top;        /* reference for the logits of a draw: any number near the largest */
    double soonest;   /* arrival of a known token of the draw: later ones cannot come first */
    uint32_t *listed; /* [V]: of each SIFT tokens those remaining, then NONE if there is room */
} screen;

#define NONE UINT32_MAX

static float deviation(const screen *c, size_t row) {
    return c->noise * ((c->of.deviation[row] + ROUNDING) * c->of.head->scales[row]);
}

/* Turn logits into weights of a draw, up to a common factor. u: the noise of their tokens. */
static void weigh(const screen *c, float *x, double *u, const uint32_t *tokens, size_t n) {
    const bn_vector_kernels *vectors = &c->of.m->kernels.vectors;
    for (size_t i = 0; i < n; i++)
        x[i] = (x[i] - c->top) / c->draw->temperature;
    vectors->exp_sum(x, n, 0);
    vectors->noise(u, tokens, n, c->draw->seed, c->draw->position);
}

/* Tokens that reach the bar or may come first, as -ln u >= 1 - u. Returns how many. */
static size_t may_come_first(const screen *c, uint32_t *left, const bn_estimates *a, size_t first) {
    const double margin = 1.001; /* exceeds all rounding errors of a weight */
    float most[SIFT], weight[SIFT];
    double u[SIFT];
    size_t n = 0;
    for (size_t i = 0; i < a->n; i++) {
        most[i] = weight[i] = bn_at_most(a, i);
        left[i] = (uint32_t)(first + i);
    }
    weigh(c, weight, u, left, a->n);
    for (size_t i = 0; i < a->n; i++)
        if (!(most[i] < c->bar) || !(1 - u[i] > c->soonest * (double)weight[i] * margin))
            left[n++] = (uint32_t)(first + i);
    return n;
}

static size_t may_reach(const screen *c, uint32_t *left, const bn_estimates *a, size_t first) {
    const size_t n = c->of.m->kernels.vectors.may_reach(left, a, c->bar);
    for (size_t i = 0; i < n; i++)
        left[i] += (uint32_t)first;
    return n;
}

/* Rule out tokens, and compute the logits of the rest in full. */
static void sift(void *context, int32_t thread, size_t part, size_t end) {
    (void)thread, (void)end; /* one part */
    const screen *c = context;
    const size_t first = part * SIFT, count = bn_min(c->of.head->rows - first, SIFT);
    const bn_estimates estimates = {.y = c->of.logits + first,
                                    .deviation = c->of.deviation + first,
                                    .scales = c->of.head->scales + first,
                                    .rounding = ROUNDING,
                                    .noise = SIGMAS * c->noise,
                                    .n = count};
    uint32_t *left = c->listed + first;
    const size_t n = (c->draw ? may_come_first : may_reach)(c, left, &estimates, first);
    bn_linear_int8_rows(&c->of.w->in, c->of.head, left, n, c->of.logits + first);
    if (n < count)
        left[n] = NONE;
}

/* Compact the remaining tokens of all parts and their logits. Returns how many. */
static size_t gather(const screen *c) {
    const size_t V = c->of.head->rows;
    size_t n = 0;
    for (size_t first = 0; first < V; first += SIFT)
        for (size_t i = first; i < bn_min(V, first + SIFT) && c->listed[i] != NONE; i++, n++) {
            c->of.logits[n] = c->of.logits[i];
            c->listed[n] = c->listed[i];
        }
    return n;
}

/* The minimum of the maxima of k parts: at least k of V numbers reach it, and not many more. */
static float least_maximum(const bn_kernels *kernels, const float *x, size_t V, size_t k) {
    float least = INFINITY;
    for (size_t i = 0; i < k && i < V; i++) {
        size_t first, end;
        bn_share(V, (int32_t)i, (int32_t)bn_min(k, V), &first, &end);
        least = fminf(least, kernels->vectors.max(x + first, end - first));
    }
    return least;
}

/* Insertion sort: few numbers reach a bar that k of them reach, and fewer reach the k-th so far.
 * Ids ascend, so a tie goes after those before it, and a tie with the k-th never enters. */
size_t bn_largest(const bn_kernels *kernels, const float *x, size_t V, size_t k, float least,
                  uint32_t *top) {
    enum { BLOCK = 1024 };
    uint32_t list[BLOCK];
    float bar = fmaxf(least, least_maximum(kernels, x, V, k));
    size_t n = 0;
    for (size_t first = 0; first < V; first += BLOCK) {
        const size_t size = bn_min(V - first, BLOCK);
        const size_t listed = kernels->vectors.reaching(list, x + first, bar, size);
        for (size_t j = 0; j < listed; j++) {
            const uint32_t i = (uint32_t)first + list[j];
            if (n == k && !(x[i] > bar))
                continue;
            size_t at = n < k ? n++ : k - 1;
            for (; at > 0 && x[top[at - 1]] < x[i]; at--)
                top[at] = top[at - 1];
            top[at] = i;
            if (n == k)
                bar = x[top[k - 1]];
        }
    }
    return n;
}

int bn_head_screens(const bn_stack *s) {
    return s->head.encoding && s->head.encoding->screens && !s->head.bias &&
           s->config.logit_softcap == 0;
}

/* The earliest arrival among n tokens with known logits, excluding those that will be changed. */
static double soonest_of(const screen *c, const uint32_t *tokens, const float *logits, size_t n,
                         const bn_wanted *wanted) {
    float weight[BN_SCREEN_MOST];
    double u[BN_SCREEN_MOST], soonest = INFINITY;
    memcpy(weight, logits, n * sizeof *weight);
    weigh(c, weight, u, tokens, n);
    for (size_t i = 0; i < n; i++) {
        int stays = 1;
        for (size_t j = 0; j < wanted->n; j++)
            stays &= wanted->changed[j] != (int32_t)tokens[i];
        if (stays)
            soonest = fmin(soonest, -bn_log(u[i]) / (double)weight[i]);
    }
    return soonest;
}

/* Compute the likeliest tokens in full. The k-th largest of them is a bar that at least k tokens
 * reach, and the earliest of them arrives before most others. */
static void take_sample(screen *c, const bn_wanted *wanted) {
    uint32_t top[BN_SCREEN_MOST], order[BN_SCREEN_MOST];
    float right[BN_SCREEN_MOST], squares = 0;
    const bn_kernels *kernels = &c->of.m->kernels;
    const float *y = c->of.logits;
    const size_t k = wanted->k + wanted->n; /* those to be changed may be among them */
    const size_t n = bn_largest(kernels, y, c->of.head->rows, bn_max(k, SAMPLE), -INFINITY, top);
    bn_linear_int8_rows(&c->of.w->in, c->of.head, top, n, right);
    for (size_t i = 0; i < n; i++) {
        const float e = (right[i] - y[top[i]]) / deviation(c, top[i]);
        squares += e * e;
    }
    c->noise *= fmaxf(1.0f, sqrtf(squares / (float)n));
    c->bar = right[order[bn_largest(kernels, right, n, k, -INFINITY, order) - 1]] - wanted->span;
    c->top = right[order[0]];
    if (c->draw)
        c->soonest = soonest_of(c, top, right, n, wanted);
}

size_t bn_head_wanted(const bn_model *m, const bn_stack *stack, const bn_workspace *w,
                      const bn_wanted *wanted, float *logits, uint32_t *listed) {
    int32_t squares = 0;
    for (size_t i = 0; i < stack->config.dim; i++)
        squares += w->in.q[i] * w->in.q[i];
    screen c = {.of = sketch_of(m, stack, w, 1, logits),
                .noise = sqrtf((float)squares) / w->in.s[0],
                .draw = wanted->draw,
                .listed = listed};
    take_sample(&c, wanted);
    for (size_t i = 0; i < wanted->n; i++)
        logits[wanted->changed[i]] = INFINITY; /* reaches every bar */
    bn_pool_run(w->in.pool, bn_div_up(c.of.head->rows, SIFT), 1, sift, &c);
    return gather(&c);
}
