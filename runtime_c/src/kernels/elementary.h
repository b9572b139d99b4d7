/* SPDX-License-Identifier: MIT
 *
 * elementary.h: sine, cosine and logarithm with the same bits on every machine, unlike the C
 * library's.
 */
#ifndef BITNET_ELEMENTARY_H
#define BITNET_ELEMENTARY_H

#define BN_MOST_ANGLE 16777216.0f

/* Error below 1e-8; NaN unless |x| < BN_MOST_ANGLE. */
void bn_sincos(double x, double *sine, double *cosine);

double bn_log(double x); /* x normal and > 0 */

#endif
