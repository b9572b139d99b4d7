/* SPDX-License-Identifier: MIT
 *
 * turn.c: see turn.h.
 */
#include "turn.h"

#include <stdlib.h>

/* A forked child may get the workspace in the middle of its parent's turn, so no contents are
 * relied on. */
bn_workspace *bn_turn_begin(const bn_model *m) {
    bn_pool_lock(m->pool);
    return m->work;
}

void bn_turn_end(const bn_model *m) {
    bn_pool_unlock(m->pool);
}

static bn_room room_of(const bn_model *m) {
    return m->work ? (bn_room){m->work->batch, m->work->n_ctx} : (bn_room){0};
}

bn_room bn_turn_room(const bn_model *m) {
    bn_pool_lock(m->pool);
    const bn_room room = room_of(m);
    bn_pool_unlock(m->pool);
    return room;
}

static bn_room both(bn_room a, bn_room b) {
    return (bn_room){bn_max(a.batch, b.batch), bn_max(a.n_ctx, b.n_ctx)};
}

static int fits(bn_room have, bn_room wanted) {
    return wanted.batch <= have.batch && wanted.n_ctx <= have.n_ctx;
}

size_t bn_turn_growth(const bn_model *m, bn_room have, bn_room wanted) {
    const bn_room room = both(have, wanted);
    return fits(have, wanted) ? 0 : bn_workspace_size(m, &m->stack, room.batch, room.n_ctx);
}

bn_status bn_turn_join(bn_model *m, bn_room wanted) {
    bn_status status = BN_OK;
    bn_pool_lock(m->pool);
    const bn_room have = room_of(m), room = both(have, wanted);
    if (!fits(have, wanted)) {
        bn_workspace *old = m->work;
        bn_workspace *larger = bn_workspace_new(m, &m->stack, room.batch, room.n_ctx);
        if (larger) {
            m->work = larger;
            free(old);
        } else {
            status = BN_ERR_MEMORY;
        }
    }
    if (!status)
        atomic_fetch_add(&m->n_sessions, 1);
    bn_pool_unlock(m->pool);
    return status;
}

/* Only the last session has to wait for a turn; after it, only images take turns. */
void bn_turn_leave(bn_model *m) {
    if (atomic_fetch_sub(&m->n_sessions, 1) > 1)
        return;
    bn_pool_lock(m->pool);
    if (atomic_load(&m->n_sessions) == 0) {
        bn_workspace *old = m->work;
        m->work = NULL; /* first, as a child forked in between must not find it */
        free(old);
    }
    bn_pool_unlock(m->pool);
}
