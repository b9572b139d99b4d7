/* SPDX-License-Identifier: MIT
 *
 * elementary.h: sine, cosine and logarithm with the same bits on every machine, unlike the C
 * library's.
 */
#ifndef BITNET_ELEMENTARY_H
#define BITNET_ELEMENTARY_H

/* Error below 1e-8; NaN unless |x| < 2^24. */
void bn_sincos(double x, double *sine, double *cosine);

double bn_log(double x); /* x normal and > 0 */

#endif
