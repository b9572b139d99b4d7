/* SPDX-License-Identifier: MIT
 *
 * feed_forward.c: see feed_forward.h.
 */
#include "feed_forward.h"

#include "mixture.h"
#include "pass.h"

void bn_feed_forward(bn_pass *p, const bn_ffn *ffn) {
    bn_product products[2];
    if (ffn->router.data) {
        bn_mixture(p, ffn);
        return;
    }
    const int n = bn_ffn_products(p, ffn, ffn->networks, 0, products);
    bn_project(p, &ffn->norm, products, n);
    bn_ffn_activate(p, ffn, NULL);
    bn_add(p, &ffn->networks->down, &ffn->post_norm);
}
