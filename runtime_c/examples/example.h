/* SPDX-License-Identifier: MIT
 *
 * example.h: shared by the examples: token ids are read and printed as decimal numbers, and an
 * error ends the program. (A tokenizer converts text to ids and back, see BN_SECTION_TOKENIZER.)
 */
#ifndef BITNET_EXAMPLE_H
#define BITNET_EXAMPLE_H

#include <bitnet_runtime.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* Parse a number from `low` to INT32_MAX; ends the program if the text is not one. */
static inline int32_t number(const char *text, int32_t low) {
    char *end;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || errno || value < low || value > INT32_MAX) {
        fprintf(stderr, "'%s' is not a number from %d to %d\n", text, (int)low, INT32_MAX);
        exit(2);
    }
    return (int32_t)value;
}

/* Ends the program unless the status is BN_OK; `why` is what bn_model_open wrote, or NULL. */
static inline void check(bn_status status, const char *what, const char *why) {
    if (status == BN_OK)
        return;
    fprintf(stderr, "%s: %s%s%s\n", what, bn_status_text(status), why ? ": " : "", why ? why : "");
    exit(1);
}

static inline bn_model *open_model(const char *path) {
    bn_model *model;
    char why[BN_DETAIL_SIZE];
    check(bn_model_open(path, NULL, &model, why), path, why);
    return model;
}

#endif
