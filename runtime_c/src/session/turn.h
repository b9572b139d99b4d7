/* SPDX-License-Identifier: MIT
 *
 * turn.h: sessions of a model take turns. Who has the turn has the threads and the workspace, which
 * is there from the first session to the last, as large as the largest of them wants it.
 */
#ifndef BITNET_TURN_H
#define BITNET_TURN_H

#include "model.h"
#include "workspace.h"

/* Wait for a turn. Turns come in the order in which they were asked for. */
bn_workspace *bn_turn_begin(const bn_model *m);
void bn_turn_end(const bn_model *m);

/* What the workspace has room for now. */
typedef struct bn_room {
    size_t batch, n_ctx;
} bn_room;
bn_room bn_turn_room(const bn_model *m);

/* Bytes to be found for a session that wants so much, if there is so much already. A larger
 * workspace is made before the other goes, so it counts in full. */
size_t bn_turn_growth(const bn_model *m, bn_room have, bn_room wanted);

/* One session more, which wants so much, or one less. Fails with BN_ERR_MEMORY. */
bn_status bn_turn_join(bn_model *m, bn_room wanted);
void bn_turn_leave(bn_model *m);

#endif
