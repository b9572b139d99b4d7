/* SPDX-License-Identifier: MIT
 *
 * logits.h: the logits of a session's last token, from its hidden state, when they are asked for.
 */
#ifndef BITNET_LOGITS_H
#define BITNET_LOGITS_H

#include "session.h"
#include "workspace.h"

/* In a turn: the state becomes row 0 of x. */
void bn_load_hidden(const bn_session *s, bn_workspace *w);

/* In a turn: all logits, unless they are there. */
bn_status bn_full_logits(bn_session *s, bn_workspace *w);

#endif
