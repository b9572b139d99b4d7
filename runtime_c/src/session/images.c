/* SPDX-License-Identifier: MIT
 *
 * images.c: images to vectors. Several images go through the layers together, in one turn, each
 * with its own keys and values. Nothing is kept: all memory belongs to the call.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "cache.h"
#include "forward.h"
#include "images.h"
#include "leave.h"
#include "probe.h"
#include "system/memory.h"
#include "system/pages.h"
#include "turn.h"

/* Limits on images computed together: their number, their rows, and the bytes of patch inputs. Each
 * thread takes ROWS_APART rows through a layer at a time, so that intermediate results stay in its
 * L2 cache and in few pages. */
enum { IMAGES = 128, ROWS = 512, ROWS_APART = 64, MOST_BYTES = 64 << 20 };

/* bn_stop has no atomic member, so that C++ can read the header. */
_Static_assert(sizeof(bn_stop) == sizeof(atomic_int), "a stop is an atomic int");

void bn_stop_now(bn_stop *stop) {
    if (stop)
        atomic_store((atomic_int *)(void *)stop, 1);
}

/* State of one call. */
typedef struct work {
    const bn_model *m;
    const bn_stack *stack;
    const atomic_int *stop;
    size_t each;     /* rows per image */
    size_t together; /* images per turn */
    bn_workspace *w;
    bn_cache *caches; /* [together] */
    size_t cache_bytes;
    uint8_t *keys; /* [together][cache_bytes] for the layers, then for pooling */
} work;

static size_t lay_out(bn_cache *cache, const bn_model *m, const bn_stack *stack, size_t each,
                      uint8_t *base) {
    *cache = (bn_cache){.type = m->image_kv_type, .prefix = each};
    const size_t bytes = bn_cache_plan(cache, stack, each, each);
    bn_cache_place(cache, base);
    return bytes;
}

size_t bn_images_together(const bn_stack *stack, size_t n) {
    const size_t each = stack->config.max_context;
    const size_t most =
        bn_min(ROWS / each, MOST_BYTES / (each * stack->patch.cols * sizeof(float)));
    return bn_min(bn_min(n, IMAGES), most > 0 ? most : 1);
}

static work plan(const bn_model *m, size_t n, const bn_stop *stop) {
    const bn_stack *stack = &m->vision;
    bn_cache cache;
    work k = {.m = m, .stack = stack, .each = stack->config.max_context};
    k.stop = (const atomic_int *)(const void *)stop;
    k.together = bn_images_together(stack, n);
    k.cache_bytes = lay_out(&cache, m, stack, k.each, NULL);
    if (stack->pooling) {
        const size_t of_pool = lay_out(&cache, m, stack->pooling, k.each, NULL);
        k.cache_bytes = bn_max(of_pool, k.cache_bytes);
    }
    return k;
}

static bn_status make(work *k) {
    const size_t rows = k->together * k->each, threads = (size_t)bn_pool_threads(k->m->pool);
    const size_t batch = bn_min(rows, bn_max(ROWS_APART * threads, k->together));
    size_t keys = k->together * k->cache_bytes;
    const uint64_t bytes = bn_workspace_size(k->m, k->stack, batch, rows) + keys;
    if (bn_memory_left("", BN_MEMORY_OWN, bytes).bytes < bytes)
        return BN_ERR_MEMORY;
    k->w = bn_workspace_new(k->m, k->stack, batch, rows);
    k->caches = calloc(k->together, sizeof *k->caches);
    k->keys = bn_pages_new(&keys);
    return k->w && k->caches && k->keys ? BN_OK : BN_ERR_MEMORY;
}

static void give_back(work *k) {
    free(k->w);
    free(k->caches);
    free(k->keys);
}

static void lay_out_all(work *k, const bn_stack *stack, size_t n) {
    for (size_t i = 0; i < n; i++)
        lay_out(&k->caches[i], k->m, stack, k->each, k->keys + i * k->cache_bytes);
}

static size_t pixels_of(const bn_config *c) {
    return (size_t)c->channels * c->image_size * c->image_size;
}

/* The class token before the patches enters as a vector. */
static void add_rows(work *k, const float *pixels, size_t n) {
    const bn_config *c = &k->stack->config;
    lay_out_all(k, k->stack, n);
    for (size_t row = 0; row < n * k->each; row++) {
        const size_t image = row / k->each, position = row % k->each;
        const int is_patch = position >= c->class_token;
        k->w->rows[row] = (bn_row){.cache = &k->caches[image],
                                   .position = (int32_t)position,
                                   .token = BN_NO_TOKEN,
                                   .vector = is_patch ? NULL : k->stack->class_embedding,
                                   .pixels = is_patch ? pixels + image * pixels_of(c) : NULL};
    }
}

typedef bn_status give(work *k, size_t n, float *out);

/* Output the states of all rows. */
static bn_status give_states(work *k, size_t n, float *out) {
    const size_t rows = n * k->each, width = bn_width(&k->stack->config);
    bn_status status = BN_OK;
    for (size_t first = 0; first < rows && !status; first += k->w->batch) {
        bn_workspace w = bn_workspace_from(k->w, first);
        const size_t piece = bn_min(rows - first, w.batch);
        status = bn_leave_states(k->m, k->stack, &w, piece);
        if (!status)
            status = bn_leave(k->stack, &w, piece, out + first * width);
    }
    return status;
}

/* h[i] = the mean of the states of image i, or its first or last state. */
static bn_status pool(work *k, size_t n) {
    const bn_config *c = &k->stack->config;
    const size_t D = c->dim, first = c->pooling == BN_POOL_LAST ? k->each - 1 : 0;
    const size_t rows = c->pooling == BN_POOL_MEAN ? k->each : 1;
    for (size_t i = 0; i < n; i++) {
        float *h = k->w->in.h + i * k->w->in.wide;
        float *x = k->w->x + (i * k->each + first) * bn_row_stride(D);
        for (size_t row = 0; row < rows; row++, x += bn_row_stride(D)) {
            if (!bn_norm_row(&k->m->kernels, &k->stack->final_norm, x, x, D))
                return BN_ERR_NUMERIC;
            for (size_t d = 0; d < D; d++)
                h[d] = row > 0 ? h[d] + x[d] : x[d];
        }
        for (size_t d = 0; d < D; d++)
            h[d] /= (float)rows;
    }
    return BN_OK;
}

/* Output one unit vector per image. */
static bn_status give_pooled(work *k, size_t n, float *out) {
    const size_t width = bn_width(&k->stack->config);
    bn_status status;
    if (k->stack->pooling) {
        lay_out_all(k, k->stack->pooling, n);
        status = bn_probe(k->m, k->stack, k->w, n, k->each);
    } else {
        status = pool(k, n);
    }
    if (!status)
        status = bn_leave(k->stack, k->w, n, out);
    for (size_t i = 0; i < n && !status; i++, out += width)
        status = bn_leave_unit(&k->m->kernels, out, out, width);
    return status;
}

/* One turn. */
static bn_status run(work *k, const float *pixels, size_t n, give *wanted, float *out) {
    bn_turn_begin(k->m); /* only for the threads: the workspace is the call's */
    add_rows(k, pixels, n);
    bn_status status = bn_forward(k->m, k->stack, k->w, n * k->each, k->stop);
    if (!status)
        status = wanted(k, n, out);
    bn_turn_end(k->m);
    return status;
}

static bn_status check(const bn_model *m, const float *pixels, int32_t n, const float *out) {
    if (!m || !pixels || !out || n < 1)
        return BN_ERR_ARGUMENT;
    if (!bn_sees(m))
        return BN_ERR_INPUT;
    for (size_t i = 0; i < (size_t)n * pixels_of(&m->vision.config); i++)
        if (!isfinite(pixels[i]))
            return BN_ERR_NUMERIC;
    return BN_OK;
}

/* floats: outputs per image */
static bn_status see(const bn_model *m, const float *pixels, int32_t n, give *wanted, size_t floats,
                     float *out, const bn_stop *stop) {
    const size_t images = (size_t)n, of_image = pixels_of(&m->vision.config);
    work k = plan(m, images, stop);
    bn_status status = make(&k);
    for (size_t first = 0; first < images && !status; first += k.together)
        status = run(&k, pixels + first * of_image, bn_min(images - first, k.together), wanted,
                     out + first * floats);
    give_back(&k);
    return status;
}

bn_status bn_image_encode(const bn_model *m, const float *pixels, int32_t n, float *out,
                          const bn_stop *stop) {
    BN_STANDARD_FLOATS;
    const bn_status status = check(m, pixels, n, out);
    if (status)
        return status;
    const bn_config *c = &m->vision.config;
    return see(m, pixels, n, give_states, c->max_context * bn_width(c), out, stop);
}

bn_status bn_image_embed(const bn_model *m, const float *pixels, int32_t n, float *out,
                         const bn_stop *stop) {
    BN_STANDARD_FLOATS;
    const bn_status status = check(m, pixels, n, out);
    if (status)
        return status;
    const bn_config *c = &m->vision.config;
    return c->pooling ? see(m, pixels, n, give_pooled, bn_width(c), out, stop) : BN_ERR_ARGUMENT;
}
