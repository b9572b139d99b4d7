/* SPDX-License-Identifier: MIT
 *
 * clock.c: see clock.h.
 */
#define _POSIX_C_SOURCE 200112L /* clock_gettime */

#include "clock.h"

#include <time.h>

int64_t bn_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
