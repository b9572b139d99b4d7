/* SPDX-License-Identifier: MIT
 *
 * probe.h: pooling by attention: one more layer, in which a query of the model's own looks at the
 * states of a text or an image.
 *
 *     y = o( attention( q(probe), k(states), v(states) ));   y += down( act( up( norm(y) )))
 */
#ifndef BITNET_PROBE_H
#define BITNET_PROBE_H

#include "model.h"
#include "workspace.h"

/* After bn_forward of `images` times `each` rows: h[i] = the vector of the i-th. The caches are
 * laid out for stack->pooling, and what they hold is lost. BN_ERR_NUMERIC when one is not finite.
 */
bn_status bn_probe(const bn_model *m, const bn_stack *stack, bn_workspace *w, size_t images,
                   size_t each);

#endif
