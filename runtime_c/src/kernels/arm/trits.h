/* SPDX-License-Identifier: MIT
 *
 * trits.h: trits_template.h on a 128-bit register.
 */
#ifndef BITNET_ARM_TRITS_H
#define BITNET_ARM_TRITS_H

#include "arm.h"

#define TRIT_BYTES 16
#include "../trits_template.h"

#endif
