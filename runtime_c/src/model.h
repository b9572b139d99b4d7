/* SPDX-License-Identifier: MIT
 *
 * model.h: a packed file, opened and ready to run.
 */
#ifndef BITNET_MODEL_H
#define BITNET_MODEL_H

#include <stdatomic.h>

#include "added.h"
#include "arena.h"
#include "bitnet_runtime.h"
#include "file/file.h"
#include "kernels/kernels.h"
#include "speculation.h"
#include "stack.h"
#include "system/threads.h"

struct bn_model {
    bn_mapping mapping;
    bn_file file;
    bn_kernels kernels;
    bn_pool *pool;
    bn_stack stack;  /* text stack, for tokens or vectors; {0}: a vision-only model */
    bn_stack vision; /* vision stack; {0}: none */
    int32_t image_kv_type;
    bn_added *added; /* [n_added] adapters from separate files */
    int32_t n_added;
    struct bn_workspace *work; /* shared by the sessions, in turns (turn.h); NULL without a
                                * session */
    atomic_size_t n_sessions;
    atomic_size_t users; /* the opener, until it closes the model, and each session */
    bn_budget budget;    /* of the sessions' caches */
    bn_timings timings;  /* owned by whoever has the turn */
};

/* Whether the model takes texts; images. */
static inline int bn_reads(const bn_model *m) {
    return m->stack.layers != NULL;
}

static inline int bn_sees(const bn_model *m) {
    return m->vision.layers != NULL;
}

/* Add or remove a user (a session); the last one frees the model. */
void bn_model_join(bn_model *m);
void bn_model_leave(bn_model *m);

/* Highest rank of the adapters that rows of a stack can use; 0: there are none. */
size_t bn_most_rank(const bn_model *m, const bn_stack *stack);

#endif
