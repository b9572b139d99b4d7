/* SPDX-License-Identifier: MIT
 *
 * status.h: a status with its explanation.
 */
#ifndef BITNET_STATUS_H
#define BITNET_STATUS_H

#include "bitnet_runtime.h"

/* Writes one line to detail (BN_DETAIL_SIZE bytes or NULL), truncated to fit; returns status. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
bn_status
bn_fail(char *detail, bn_status status, const char *format, ...);

#endif
