/* SPDX-License-Identifier: MIT
 *
 * probe.h: attention pooling: an additional layer in which a learned query attends to the states of
 * an image.
 *
 *     y = o( attention( q(probe), k(states), v(states) ));   y += down( act( up( norm(y) )))
 */
#ifndef BITNET_PROBE_H
#define BITNET_PROBE_H

#include "model.h"
#include "workspace.h"

/* After bn_forward of images · each rows: h[i] = the pooled vector of image i. The caches must be
 * laid out for stack->pooling; their contents are overwritten. BN_ERR_NUMERIC if a value is not
 * finite. */
bn_status bn_probe(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t images,
                   size_t each);

#endif
