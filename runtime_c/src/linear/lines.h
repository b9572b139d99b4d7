/* SPDX-License-Identifier: MIT
 *
 * lines.h: matrices stored as lines, TERNARY_2BIT_ROWS and TERNARY_2BIT_COLUMNS; see encodings.h.
 */
#ifndef BITNET_LINES_H
#define BITNET_LINES_H

#include "operands.h"

void bn_multiply_rows(const bn_input *in, const bn_product *p);
void bn_multiply_columns(const bn_input *in, const bn_product *p);

#endif
