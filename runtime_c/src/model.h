/* SPDX-License-Identifier: MIT
 *
 * model.h: a packed file, open and ready to run.
 */
#ifndef BITNET_MODEL_H
#define BITNET_MODEL_H

#include <stdatomic.h>

#include "added.h"
#include "arena.h"
#include "bitnet_runtime.h"
#include "file/file.h"
#include "kernels/kernels.h"
#include "pace.h"
#include "stack.h"
#include "system/threads.h"

struct bn_model {
    bn_mapping mapping;
    bn_file file;
    bn_kernels kernels;
    bn_pool *pool;
    bn_stack stack;  /* of tokens, or of vectors; {0}: the model only sees images */
    bn_stack vision; /* of images; {0}: it sees none */
    int32_t image_kv_type;
    bn_added *added; /* [n_added] adapters that texts can have */
    int32_t n_added;
    struct bn_workspace *work; /* of the sessions there are, in turns (turn.h); NULL without one */
    atomic_size_t n_sessions;
    atomic_size_t users; /* who opened it, until it is closed, and each session */
    bn_budget budget;    /* of their caches */
    bn_pace pace;        /* of who has the turn */
};

static inline int bn_reads(const bn_model *m) {
    return m->stack.layers != NULL;
}

/* A session begins, or ends; the last user frees the model. */
void bn_model_join(bn_model *m);
void bn_model_leave(bn_model *m);

/* Of the adapters that rows of a stack of it can have; 0: there are none. */
size_t bn_most_rank(const bn_model *m, const bn_stack *stack);

static inline int bn_sees(const bn_model *m) {
    return m->vision.layers != NULL;
}

#endif
