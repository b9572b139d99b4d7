/* SPDX-License-Identifier: MIT
 *
 * feed_forward.h: the second half of a layer.
 *
 *     x += post_norm( network( norm(x) ))      one network (network.h), or a mixture (mixture.h)
 *
 * or, with residual_norm, x = post_norm( x + network(x) ).
 */
#ifndef BITNET_FEED_FORWARD_H
#define BITNET_FEED_FORWARD_H

#include "network.h"

void bn_feed_forward(struct bn_pass *p, const bn_ffn *ffn);

#endif
