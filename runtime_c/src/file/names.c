/* SPDX-License-Identifier: MIT
 *
 * names.c: the names of tensors in messages.
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
    static const char *const of_stack[BN_STACK_ROLES - BN_EMBEDDING] = {
        [BN_EMBEDDING - BN_EMBEDDING] = "embedding",
        [BN_POSITION - BN_EMBEDDING] = "position",
        [BN_FINAL_NORM - BN_EMBEDDING] = "final_norm",
        [BN_HEAD - BN_EMBEDDING] = "head",
        [BN_EMBEDDING_NORM - BN_EMBEDDING] = "embedding_norm",
        [BN_ROPE_FREQUENCIES - BN_EMBEDDING] = "rope_frequencies",
        [BN_ROPE_LOCAL_FREQUENCIES - BN_EMBEDDING] = "rope_local_frequencies",
        [BN_DRAFT_HIDDEN_NORM - BN_EMBEDDING] = "draft_hidden_norm",
        [BN_DRAFT_EMBEDDING_NORM - BN_EMBEDDING] = "draft_embedding_norm",
        [BN_DRAFT_PROJECTION - BN_EMBEDDING] = "draft_projection",
        [BN_PATCH - BN_EMBEDDING] = "patch",
        [BN_CLASS_EMBEDDING - BN_EMBEDDING] = "class_embedding",
        [BN_PROJECTOR - BN_EMBEDDING] = "projector",
        [BN_POOL_PROBE - BN_EMBEDDING] = "pool_probe",
        [BN_POOL_Q - BN_EMBEDDING] = "pool_q",
        [BN_POOL_K - BN_EMBEDDING] = "pool_k",
        [BN_POOL_V - BN_EMBEDDING] = "pool_v",
        [BN_POOL_O - BN_EMBEDDING] = "pool_o",
        [BN_POOL_NORM - BN_EMBEDDING] = "pool_norm",
        [BN_POOL_UP - BN_EMBEDDING] = "pool_up",
        [BN_POOL_DOWN - BN_EMBEDDING] = "pool_down",
    };
    if (role < BN_LAYER_ROLES)
        return of_layer[role];
    if (role >= BN_EMBEDDING && role < BN_STACK_ROLES)
        return of_stack[role - BN_EMBEDDING];
    return NULL;
}

/* Suffix of a role name; empty for tensors with a single part. */
static const char *part_name(const bn_record *r) {
    static const char *const parts[] = {".weight", ".bias", ".adapter_in", ".adapter_out"};
    const int alone = r->role == BN_ROPE_FREQUENCIES || r->role == BN_ROPE_LOCAL_FREQUENCIES ||
                      r->role == BN_CLASS_EMBEDDING || r->role == BN_POOL_PROBE;
    if (alone)
        return "";
    return r->part < sizeof parts / sizeof *parts ? parts[r->part] : ".(unknown part)";
}

void bn_record_name(const bn_record *r, char name[BN_NAME_SIZE]) {
    char stack[16] = "", layer[16] = "", expert[16] = "", role[24];
    const int linear_norm = r->role > BN_LINEAR_NORM && r->role < BN_EMBEDDING;
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
    snprintf(name, BN_NAME_SIZE, "%s%s%s%s%s", stack, layer, expert, role, part_name(r));
}
