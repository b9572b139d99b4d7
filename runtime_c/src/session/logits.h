/* SPDX-License-Identifier: MIT
 *
 * logits.h: the logits of a session's last token, computed from its hidden state on demand.
 */
#ifndef BITNET_LOGITS_H
#define BITNET_LOGITS_H

#include "session.h"
#include "workspace.h"

/* In a turn: copy the hidden state to row 0 of x. */
void bn_load_hidden(const bn_session *s, bn_workspace *w);

/* In a turn: compute all logits, unless they are available. */
bn_status bn_full_logits(bn_session *s, bn_workspace *w);

#endif
