/* SPDX-License-Identifier: MIT
 *
 * elementary.c: sine, cosine and logarithm from IEEE operations alone. C libraries differ in the
 * last bits of these functions; a model's answers must not.
 */
#include "elementary.h"

#include "system/floats.h" /* rejects compiler flags that would change results */

#include <math.h>
#include <stdint.h>
#include <string.h>

void bn_sincos(double x, double *sine, double *cosine) {
    /* frequencies of an unverified file may be anything */
    if (!(fabs(x) < (double)BN_MOST_ANGLE)) {
        *sine = *cosine = (double)NAN;
        return;
    }
    /* pi/2 in three parts of 33 bits each, so that n times the first two is exact for n < 2^20 */
    const double p1 = 1.57079632673412561417e+00, p2 = 6.07710050630396597660e-11,
                 p3 = 2.02226624879595063154e-21;
    const double n = rint(x * 0.63661977236758134308);
    const double r = ((x - n * p1) - n * p2) - n * p3; /* |r| <= pi/4 */
    const double r2 = r * r;
    double s = 0, c = 0; /* Taylor: the first term left out is below 2^-53 */
    for (int k = 17; k >= 3; k -= 2)
        s = (s + 1) * -r2 / (k * (k - 1));
    for (int k = 18; k >= 2; k -= 2)
        c = (c + 1) * -r2 / (k * (k - 1));
    s = r + r * s;
    c = 1 + c;
    switch ((int64_t)n & 3) {
    case 0:
        *sine = s, *cosine = c;
        break;
    case 1:
        *sine = c, *cosine = -s;
        break;
    case 2:
        *sine = -s, *cosine = -c;
        break;
    default:
        *sine = -c, *cosine = s;
        break;
    }
}

double bn_log(double x) {
    /* x = 2^e · m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m - 1)/(m + 1)) */
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t e = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0x000FFFFFFFFFFFFFu) | 0x3FF0000000000000u;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.41421356237309504880) {
        m *= 0.5;
        e++;
    }
    const double z = (m - 1) / (m + 1), z2 = z * z; /* z2 < 0.0295 */
    double sum = 0;
    for (int k = 21; k >= 1; k -= 2)
        sum = sum * z2 + 1.0 / k;
    return (double)e * 0.69314718055994530942 + 2 * z * sum;
}
