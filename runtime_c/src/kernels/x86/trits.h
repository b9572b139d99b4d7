/* SPDX-License-Identifier: MIT
 *
 * trits.h: trits_template.h on the tier's register.
 */
#ifndef BITNET_X86_TRITS_H
#define BITNET_X86_TRITS_H

#include "register.h"

#if REGISTER_BITS == 512
INLINE bytes add_where(bytes sum, bytes s, int least, int power) {
    return _mm512_mask_add_epi8(sum, _mm512_cmpge_epi8_mask(s, bytes_fill(least)), sum,
                                bytes_fill(power));
}
#define TRITS_ADD_WHERE(sum, s, least, power)                                                      \
    (octets) add_where((bytes)(sum), (bytes)(s), least, power)
#endif
#define TRIT_BYTES sizeof(bytes)
#include "../trits_template.h"

#endif
