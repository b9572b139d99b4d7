/* SPDX-License-Identifier: MIT
 *
 * score.h: logits as probabilities.
 */
#ifndef BITNET_SCORE_H
#define BITNET_SCORE_H

#include "kernels.h"

/* log softmax(logits)[token]; the sum in double. */
float bn_log_probability(const bn_kernels *k, const float *logits, size_t V, int32_t token);

#endif
