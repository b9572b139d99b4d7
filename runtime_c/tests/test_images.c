/* SPDX-License-Identifier: MIT
 *
 * test_images.c: image encoding, compared with a plain computation in double.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "image_model.h"

static void multiply(double *y, const bn_tensor *t, const double *x) {
    const float *w = (const float *)(const void *)t->data;
    for (size_t r = 0; r < t->rows; r++) {
        y[r] = t->bias ? (double)t->bias[r] : 0;
        for (size_t i = 0; i < t->cols; i++)
            y[r] += (double)w[r * t->cols + i] * x[i];
    }
}

static void normalize(double *y, const bn_norm *norm, const double *x, size_t n) {
    double mean = 0, squares = 0;
    for (size_t i = 0; i < n; i++)
        mean += norm->kind == BN_NORM_LAYER ? x[i] / (double)n : 0;
    for (size_t i = 0; i < n; i++)
        squares += (x[i] - mean) * (x[i] - mean) / (double)n;
    for (size_t i = 0; i < n; i++)
        y[i] = !norm->gain
                   ? x[i]
                   : (x[i] - mean) / sqrt(squares + (double)norm->eps) * (double)norm->gain[i] +
                         (norm->bias ? (double)norm->bias[i] : 0);
}

/* A linear of a layer, after its own norm. */
static void project(double *y, const bn_tensor *t, const bn_config *c, const double *x) {
    const bn_norm own = bn_norm_before(t, c);
    double h[FFN];
    normalize(h, &own, x, t->cols);
    multiply(y, t, h);
}

static double activate(double g) {
    return k.act == SILU ? g / (1 + exp(-g))
           : k.act == GELU
               ? g / 2 * (1 + tanh(sqrt(2 / 3.14159265358979) * (g + 0.044715 * g * g * g)))
               : g / 2 * (1 + erf(g / sqrt(2)));
}

/* out = the attention of one query over n keys and values; cap: infinite, or that of scores. */
static void attend(double *out, const double *q, double (*keys)[HEADS * HEAD],
                   double (*values)[HEADS * HEAD], size_t n, size_t kv_heads, double cap) {
    double p[MAX_TOKENS];
    memset(out, 0, HEADS * HEAD * sizeof *out);
    for (size_t h = 0; h < HEADS; h++) {
        const size_t from = h / (HEADS / kv_heads) * HEAD;
        double sum = 0;
        for (size_t j = 0; j < n; j++) {
            p[j] = 0;
            for (size_t d = 0; d < HEAD; d++)
                p[j] += q[h * HEAD + d] * keys[j][from + d];
            p[j] *= (double)0.4f;
            sum += p[j] = exp(isinf(cap) ? p[j] : cap * tanh(p[j] / cap));
        }
        for (size_t j = 0; j < n; j++)
            for (size_t d = 0; d < HEAD; d++)
                out[h * HEAD + d] += p[j] / sum * values[j][from + d];
    }
}

/* x += scale · norm(f), or x = norm(x + scale · f) */
static void add(double *x, double *f, const bn_norm *after, double scale) {
    const int of_sum = (k.norm_flags & RESIDUAL_NORM) != 0;
    if (!of_sum)
        normalize(f, after, f, DIM);
    for (size_t i = 0; i < DIM; i++)
        x[i] += f[i] * scale;
    if (of_sum)
        normalize(x, after, x, DIM);
}

static void feed_forward(double *y, const bn_ffn *ffn, const bn_config *c, const double *x) {
    double h[DIM], gate[FFN], up[FFN];
    normalize(h, &ffn->norm, x, DIM);
    project(up, &ffn->networks->up, c, h);
    if (ffn->kind == BN_FFN_GATED)
        project(gate, &ffn->networks->gate, c, h);
    for (size_t i = 0; i < FFN; i++)
        up[i] = ffn->kind == BN_FFN_GATED ? activate(gate[i]) * up[i] : activate(up[i]);
    normalize(up, &ffn->networks->sub_norm, up, FFN);
    project(y, &ffn->networks->down, c, up);
}

static double keys[MAX_TOKENS][HEADS * HEAD], values[MAX_TOKENS][HEADS * HEAD];

static void run_layer(const bn_layer *l, const bn_config *c, double (*x)[DIM], size_t n) {
    static double queries[MAX_TOKENS][HEADS * HEAD];
    double h[DIM], out[HEADS * HEAD];
    for (size_t i = 0; i < n; i++) {
        normalize(h, &l->attn_norm, x[i], DIM);
        project(queries[i], &l->q, c, h);
        project(keys[i], &l->k, c, h);
        project(values[i], &l->v, c, h);
    }
    for (size_t i = 0; i < n; i++) {
        attend(out, queries[i], keys, values, n, KV_HEADS, (double)SOFTCAP);
        normalize(out, &l->attn_sub_norm, out, HEADS * HEAD);
        project(h, &l->o, c, out);
        add(x[i], h, &l->attn_post_norm, (double)RESIDUAL);
        feed_forward(h, &l->ffn, c, x[i]);
        add(x[i], h, &l->ffn.post_norm, (double)RESIDUAL);
    }
}

/* x = the input of the first layer */
static void enter(const bn_stack *s, const float *pixels, double (*x)[DIM]) {
    const bn_config *c = &s->config;
    const size_t P = c->patch_size, side = c->image_size / P;
    const float *positions = (const float *)(const void *)s->positions.vectors.data;
    double column[MAX_PIXELS] = {0};
    for (size_t i = 0; i < c->max_context; i++) {
        for (size_t at = 0; i >= c->class_token && at < c->channels * P * P; at++) {
            const size_t channel = at / (P * P), y = (i - c->class_token) / side * P + at / P % P;
            const size_t place = (i - c->class_token) % side * P + at % P;
            const float value = pixels[(channel * c->image_size + y) * c->image_size + place];
            column[at] = ((double)value - 0.5) / 0.25;
        }
        if (i >= c->class_token)
            multiply(x[i], &s->patch, column);
        for (size_t d = 0; d < DIM; d++)
            x[i][d] = (i < c->class_token ? (double)s->class_embedding[d] : x[i][d]) +
                      (double)positions[i * DIM + d];
        normalize(x[i], &s->embedding_norm, x[i], DIM);
    }
}

static void pool(const bn_stack *s, double (*x)[DIM], size_t n, double *y) {
    double q[HEADS * HEAD], out[HEADS * HEAD], h[DIM], probe[DIM];
    memcpy(y, x[k.pooling == BN_POOL_LAST ? n - 1 : 0], sizeof h);
    for (size_t i = 1; k.pooling == BN_POOL_MEAN && i < n; i++)
        for (size_t d = 0; d < DIM; d++)
            y[d] += x[i][d];
    for (size_t d = 0; d < DIM && k.pooling == BN_POOL_MEAN; d++)
        y[d] /= (double)n;
    if (k.pooling != BN_POOL_ATTENTION)
        return;
    const bn_layer *l = s->pooling->layers;
    for (size_t i = 0; i < n; i++) {
        multiply(keys[i], &l->k, x[i]);
        multiply(values[i], &l->v, x[i]);
    }
    for (size_t d = 0; d < DIM; d++)
        probe[d] = (double)s->probe[d];
    multiply(q, &l->q, probe);
    attend(out, q, keys, values, n, HEADS, INFINITY);
    multiply(y, &l->o, out);
    feed_forward(h, &l->ffn, &s->pooling->config, y);
    for (size_t d = 0; d < DIM; d++)
        y[d] += h[d];
}

/* y = the output of the stack. Returns its length. */
static size_t leave(const bn_stack *s, const double *x, double *y) {
    if (s->projector.data)
        multiply(y, &s->projector, x);
    else
        memcpy(y, x, DIM * sizeof *y);
    return bn_width(&s->config);
}

static void check_near(const float *found, const double *expected, size_t n, double scale) {
    for (size_t i = 0; i < n; i++) /* sums of at most 150 terms near 1 in fp32, two layers deep */
        CHECK_MSG(fabs((double)found[i] - expected[i] / scale) < 2e-5 * (1 + fabs(expected[i])),
                  "%zu: %g, expected %g", i, (double)found[i], expected[i] / scale);
}

static void check_image(const bn_stack *s, const float *pixels, const float *states,
                        const float *vector) {
    static double x[MAX_TOKENS][DIM];
    double y[MAX_OUT], pooled[DIM], squares = 0;
    const size_t n = s->config.max_context;
    enter(s, pixels, x);
    for (size_t l = 0; l < LAYERS; l++)
        run_layer(&s->layers[l], &s->config, x, n);
    for (size_t i = 0; i < n; i++) {
        normalize(x[i], &s->final_norm, x[i], DIM);
        const size_t width = leave(s, x[i], y);
        check_near(states + i * width, y, width, 1);
    }
    pool(s, x, n, pooled);
    const size_t width = leave(s, pooled, y);
    for (size_t i = 0; i < width; i++)
        squares += y[i] * y[i];
    check_near(vector, y, width, sqrt(squares));
}

/* The layout of So400m, that of CLIP with odd sizes, and others. */
static const kind kinds[] = {
    {8, 4, 3, 0, 1, PRE_NORM | NORM_BIAS, PLAIN, GELU, 55, BN_POOL_ATTENTION, 7, 0},
    {30, 7, 3, 1, 1, PRE_NORM | NORM_BIAS | EMBEDDING_NORM, PLAIN, GELU_ERF, 7, BN_POOL_FIRST, 30,
     0},
    {5, 2, 1, 1, 0, PRE_NORM | POST_NORM, GATED, SILU, 48, BN_POOL_MEAN, 9, 0},
    {3, 1, 2, 0, 0, PRE_NORM, GATED, GELU, 2, BN_POOL_ATTENTION, 0, 0},
    {4, 1, 1, 0, 0, LINEAR_NORM | SUB_NORM, GATED, SILU, 0, BN_POOL_ATTENTION, 0, 0},
    {5, 2, 1, 0, 1, RESIDUAL_NORM | LINEAR_NORM | NORM_BIAS, PLAIN, GELU, 7, BN_POOL_MEAN, 0, 0},
    {17, 1, 1, 0, 1, PRE_NORM, PLAIN, GELU, 0, BN_POOL_ATTENTION, 0,
     0}, /* several chunks of keys */
    {2, 2, 2, 1, 1, POST_NORM, PLAIN, SILU, 0, BN_POOL_LAST, 0, 0}};

static void test_reference(void) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        k = kinds[i];
        make(recipe);
        bn_model *model = open_bytes(NULL, 2);
        bn_image_info info;
        ok(bn_model_get_image_info(model, &info));
        const size_t of_image = k.channels * k.size * k.size;
        float *pixels = random_pixels(2 * of_image);
        float *states = malloc(2 * sizeof *states * info.n_tokens * info.width);
        float vectors[2 * MAX_OUT];
        ok(bn_image_encode(model, pixels, 2, states, NULL));
        ok(bn_image_embed(model, pixels, 2, vectors, NULL));
        for (size_t n = 0; n < 2; n++)
            check_image(&model->vision, pixels + n * of_image,
                        states + n * info.n_tokens * info.width, vectors + n * info.width);
        free(pixels), free(states);
        bn_model_close(model);
    }
}

int main(void) {
    test_reference();
    free(bytes);
    return 0;
}
