/* SPDX-License-Identifier: MIT
 *
 * turn.h: sessions of a model take turns. The holder of the turn has the threads and the workspace,
 * which exists from the first session to the last and is as large as the largest of them needs.
 */
#ifndef BITNET_TURN_H
#define BITNET_TURN_H

#include "model.h"
#include "workspace.h"

/* Wait for a turn; turns are granted in the order of the requests. */
bn_workspace *bn_turn_begin(const bn_model *m);
void bn_turn_end(const bn_model *m);

/* What the workspace has room for. */
typedef struct bn_room {
    size_t batch, n_ctx;
} bn_room;
bn_room bn_turn_room(const bn_model *m);

/* Bytes to allocate for a session that needs `wanted`, if the workspace has room for `have`. A
 * larger workspace is allocated before the old one is freed, so it counts in full. */
size_t bn_turn_growth(const bn_model *m, bn_room have, bn_room wanted);

/* Add a session that needs `wanted`, or remove one. Fails with BN_ERR_MEMORY. */
bn_status bn_turn_join(bn_model *m, bn_room wanted);
void bn_turn_leave(bn_model *m);

#endif
