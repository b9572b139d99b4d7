/* SPDX-License-Identifier: MIT
 *
 * names.c: what a tensor is called in messages.
 */
#include <stdio.h>

#include "file.h"

static const char *role_name(uint32_t role) {
    static const char *const of_layer[BN_LAYER_ROLES] = {
        [BN_ATTN_NORM] = "attn_norm",
        [BN_Q] = "q",
        [BN_K] = "k",
        [BN_V] = "v",
        [BN_Q_NORM] = "q_norm",
        [BN_K_NORM] = "k_norm",
        [BN_ATTN_SUB_NORM] = "attn_sub_norm",
        [BN_O] = "o",
        [BN_ATTN_POST_NORM] = "attn_post_norm",
        [BN_FFN_NORM] = "ffn_norm",
        [BN_ROUTER] = "router",
        [BN_GATE] = "gate",
        [BN_UP] = "up",
        [BN_FFN_SUB_NORM] = "ffn_sub_norm",
        [BN_DOWN] = "down",
        [BN_FFN_POST_NORM] = "ffn_post_norm",
    };
    static const char *const of_stack[] = {"embedding",
                                           "position",
                                           "final_norm",
                                           "head",
                                           NULL,
                                           "rope_frequencies",
                                           "rope_local_frequencies"};
    if (role < BN_LAYER_ROLES)
        return of_layer[role];
    if (role >= BN_EMBEDDING && role <= BN_ROPE_LOCAL_FREQUENCIES)
        return of_stack[role - BN_EMBEDDING];
    return NULL;
}

void bn_record_name(const bn_record *r, char name[BN_NAME_SIZE]) {
    char stack[16] = "", layer[16] = "", expert[16] = "", role[24];
    const int linear_norm = r->role > BN_LINEAR_NORM && r->role < BN_EMBEDDING;
    const int table = r->role == BN_ROPE_FREQUENCIES || r->role == BN_ROPE_LOCAL_FREQUENCIES;
    const char *known = role_name(linear_norm ? r->role - (uint32_t)BN_LINEAR_NORM : r->role);
    if (r->stack != 0)
        snprintf(stack, sizeof stack, "stacks.%u.", r->stack);
    if (r->layer != BN_NO_LAYER)
        snprintf(layer, sizeof layer, "layers.%u.", r->layer);
    if (r->expert != BN_NO_EXPERT)
        snprintf(expert, sizeof expert, "experts.%u.", r->expert);
    if (known != NULL)
        snprintf(role, sizeof role, "%s%s", known, linear_norm ? "_linear_norm" : "");
    else
        snprintf(role, sizeof role, "role %u", r->role);
    snprintf(name, BN_NAME_SIZE, "%s%s%s%s%s", stack, layer, expert, role,
             table     ? ""
             : r->part ? ".bias"
                       : ".weight");
}
