/* SPDX-License-Identifier: MIT
 *
 * table.c: the scalar kernels of all topics as one table.
 */
#include "scalar.h"

void bn_kernels_scalar(bn_kernels *table) {
    *table = (bn_kernels){.isa = "scalar",
                          .products = bn_scalar_products,
                          .vectors = bn_scalar_vectors,
                          .bytes = bn_scalar_bytes,
                          .training = bn_scalar_training};
    memcpy(table->attention, bn_scalar_attention, sizeof table->attention);
}
