/* SPDX-License-Identifier: MIT
 *
 * values.h: invalid values in DATA (export/FORMAT.md §4). Each function returns whether the n
 * bytes, which are whole values, contain one.
 */
#ifndef BITNET_VALUES_H
#define BITNET_VALUES_H

#include <stddef.h>
#include <stdint.h>

int bn_has_ternary_3(const uint8_t *p, size_t n);  /* a 2-bit field; n is a multiple of 64 */
int bn_has_no_trits(const uint8_t *p, size_t n);   /* a byte that does not encode five codes */
int bn_has_int8_least(const uint8_t *p, size_t n); /* -128 */
int bn_has_not_finite_f32(const uint8_t *p, size_t n);
int bn_has_not_finite_f16(const uint8_t *p, size_t n);
int bn_has_negative(const uint8_t *p, size_t n);        /* an F32 that is not finite and >= 0 */
int bn_has_bad_scale(const uint8_t *p, size_t n);       /* ... not finite, normal and > 0 */
int bn_has_bad_group_scale(const uint8_t *p, size_t n); /* an F16 that is not finite and > 0 */

#endif
