/* SPDX-License-Identifier: MIT
 *
 * fake_root.h: stand-ins for files of /proc and /sys.
 */
#ifndef BITNET_FAKE_ROOT_H
#define BITNET_FAKE_ROOT_H

#include <stdio.h>
#include <sys/stat.h>

#include "check.h"

/* Create a file below `root`, or a folder if the text is NULL. */
static inline void put_file(const char *root, const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    if (text == NULL) {
        CHECK_EQ(mkdir(path, 0700), 0);
        return;
    }
    FILE *file = fopen(path, "w");
    CHECK_MSG(file != NULL, "%s", path);
    CHECK(fputs(text, file) >= 0);
    CHECK_EQ(fclose(file), 0);
}

#endif
