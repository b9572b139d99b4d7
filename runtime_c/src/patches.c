/* SPDX-License-Identifier: MIT
 *
 * patches.c: see patches.h. Computed like other float matrices, as heads and routers can be.
 */
#include "patches.h"

#include <string.h>

#include "pass.h"

/* h = the normalized pixels of a patch, in the order (channel, y, x); 0 for rows that are not
 * patches. */
static void gather_row(const bn_pass *p, size_t row) {
    const bn_config *c = &p->stack->config;
    const bn_row *r = &p->w->rows[row];
    const size_t S = c->image_size, P = c->patch_size, side = S / P;
    float *h = p->w->in.h + row * p->w->in.wide;
    if (!r->pixels) {
        memset(h, 0, p->stack->patch.cols * sizeof *h);
        return;
    }
    const size_t patch = (size_t)r->position - c->class_token;
    const float *corner = r->pixels + patch / side * P * S + patch % side * P;
    for (size_t channel = 0; channel < c->channels; channel++) {
        const float mean = c->pixel_mean[channel], std = c->pixel_std[channel];
        for (size_t y = 0; y < P; y++) {
            const float *line = corner + (channel * S + y) * S;
            for (size_t x = 0; x < P; x++)
                *h++ = (line[x] - mean) / std;
        }
    }
}

static void gather_rows(void *context, int32_t thread, size_t first, size_t end) {
    (void)thread;
    for (size_t row = first; row < end; row++)
        gather_row(context, row);
}

void bn_patches(bn_pass *p) {
    const bn_product product = {
        .w = &p->stack->patch, .y = p->w->x, .y_stride = bn_row_stride(p->stack->config.dim)};
    bn_each_row(p, gather_rows, p);
    bn_linear(&p->w->in, 0, p->rows, &product, 1);
}
