/* SPDX-License-Identifier: MIT
 *
 * training.c: see training.h.
 */
#include "training.h"

#include "kernels/kernels.h"
#include "system/floats.h"

#include <stdatomic.h>
#include <string.h>

typedef struct shared {
    bn_train_kernel *kernel;
    const void *args;
    size_t rows;
    atomic_size_t taken; /* rows */
} shared;

/* oneDNN, which torch uses, multiplies int8 as fast with AVX-VNNI and AVX-512-VNNI, but half as
 * fast with AMX; with AVX2 it is not exact, and floats take two to three times as long. */
static int multiplies(const char *isa) {
    return strcmp(isa, "scalar") != 0 && strcmp(isa, "avxvnni") != 0 &&
           strcmp(isa, "avx512vnni") != 0;
}

int bn_training_select(bn_training_kernels *table, bn_train_product **product, const char *isa) {
    bn_kernels kernels;
    if (!bn_kernels_select(&kernels, isa))
        return 0;
    *table = kernels.training;
    *product = multiplies(kernels.isa) ? kernels.products.ternary_scaled : NULL;
    return 1;
}

static void work(void *data) {
    BN_STANDARD_FLOATS;
    shared *s = data;
    for (;;) {
        const size_t first =
            atomic_fetch_add_explicit(&s->taken, BN_TRAIN_ROWS, memory_order_relaxed);
        if (first >= s->rows)
            return;
        const size_t left = s->rows - first;
        s->kernel(s->args, first, first + (left < BN_TRAIN_ROWS ? left : BN_TRAIN_ROWS));
    }
}

void bn_training_run(bn_train_kernel *kernel, const void *args, size_t rows, bn_team *team,
                     unsigned threads) {
    shared s = {.kernel = kernel, .args = args, .rows = rows};
    if (team == NULL || threads <= 1 || rows <= BN_TRAIN_ROWS)
        work(&s);
    else
        team(work, &s, threads, 0);
}
