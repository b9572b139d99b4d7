/* SPDX-License-Identifier: MIT
 *
 * clock.h: the time that passes, by a clock that nobody sets.
 */
#ifndef BITNET_CLOCK_H
#define BITNET_CLOCK_H

#include <stdint.h>

/* Since some moment in the past. */
int64_t bn_nanoseconds(void);

static inline double bn_seconds(void) {
    return 1e-9 * (double)bn_nanoseconds();
}

#endif
