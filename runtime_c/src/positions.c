/* SPDX-License-Identifier: MIT
 *
 * positions.c: see positions.h. The frequencies, scaled or not, come from the file (FORMAT.md §3).
 */
#include "positions.h"

#include "kernels/elementary.h"

bn_positions bn_positions_read(const bn_file *file, uint32_t stack) {
    const bn_config *c = &file->stacks[stack];
    return (bn_positions){.dim = c->rope_dim,
                          .first = (int32_t)c->first_position,
                          .factor = c->rope_attention_factor,
                          .frequencies = {bn_file_vector(file, stack, BN_ROPE_FREQUENCIES),
                                          bn_file_vector(file, stack, BN_ROPE_LOCAL_FREQUENCIES)},
                          .vectors =
                              bn_file_tensor(file, stack, BN_NO_LAYER, BN_POSITION, BN_NO_EXPERT)};
}

void bn_positions_add(const bn_positions *p, const bn_kernels *kernels, int32_t position, float *x,
                      float *scratch) {
    const bn_tensor *t = &p->vectors;
    if (!t->data)
        return;
    t->encoding->row(kernels, t, (size_t)position, scratch);
    kernels->vectors.add(x, scratch, 1, t->cols);
}

void bn_positions_angles(const bn_positions *p, size_t table, int32_t position, float *angle) {
    const float *frequencies = p->frequencies[table];
    position += p->first;
    for (size_t i = 0; frequencies && i < p->dim / 2; i++) {
        double sine, cosine;
        bn_sincos((double)((float)position * frequencies[i]), &sine, &cosine);
        angle[2 * i] = (float)cosine * p->factor;
        angle[2 * i + 1] = (float)sine * p->factor;
    }
}

void bn_positions_rotate(float *head, const float *angle, size_t dim) {
    const size_t half = dim / 2;
    for (size_t i = 0; i < half; i++) {
        const float cosine = angle[2 * i], sine = angle[2 * i + 1];
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
}
