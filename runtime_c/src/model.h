/* SPDX-License-Identifier: MIT
 *
 * model.h: a packed file, open and ready to run.
 */
#ifndef BITNET_MODEL_H
#define BITNET_MODEL_H

#include <stdatomic.h>

#include "bitnet_runtime.h"
#include "file/file.h"
#include "kernels/kernels.h"
#include "stack.h"
#include "system/threads.h"

struct bn_model {
    bn_mapping mapping;
    bn_file file;
    bn_kernels kernels;
    bn_pool *pool;
    bn_stack stack;
    struct bn_workspace *work; /* of the sessions there are, in turns (turn.h); NULL without one */
    atomic_size_t n_sessions;
};

#endif
