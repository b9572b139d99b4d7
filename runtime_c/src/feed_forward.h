/* SPDX-License-Identifier: MIT
 *
 * feed_forward.h: the second half of a layer.
 *
 *     gated   x += post_norm( down( sub_norm( act(gate) · up )))     gate, up of norm(x)
 *     plain   x += post_norm( down( sub_norm( act(up) )))            up of norm(x)
 */
#ifndef BITNET_FEED_FORWARD_H
#define BITNET_FEED_FORWARD_H

#include "file/file.h"
#include "kernels/kernels.h"
#include "norm.h"

struct bn_pass;

typedef struct bn_ffn {
    uint32_t kind; /* BN_FFN_GATED or BN_FFN_PLAIN */
    bn_norm norm, sub_norm, post_norm;
    bn_tensor gate, up, down; /* F × D (gate: or none), F × D, D × F */
    bn_gate *act;             /* act(g) · u */
    int32_t rectifies;        /* act is 0 where g is not positive */
} bn_ffn;

bn_ffn bn_ffn_read(const bn_file *file, uint32_t stack, uint32_t layer, const bn_kernels *kernels);

/* Floats of workspace.ffn for up to `batch` rows. */
size_t bn_ffn_floats(const bn_config *c, size_t batch);

void bn_feed_forward(struct bn_pass *p, const bn_ffn *ffn);

#endif
