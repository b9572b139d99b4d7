/* SPDX-License-Identifier: MIT
 *
 * header_alone.c: the public header needs nothing included before it, and may come twice.
 */
#include "bitnet_runtime.h"

#include "bitnet_runtime.h" /* NOLINT: on purpose */

int main(void) {
    return bn_status_text(BN_OK) == NULL || bn_version() == NULL;
}
