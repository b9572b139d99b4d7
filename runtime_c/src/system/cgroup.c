/* SPDX-License-Identifier: MIT
 *
 * cgroup.c: see cgroup.h.
 */
#include "cgroup.h"

#include <stdio.h>
#include <string.h>

enum { PATH_SIZE = 1024 };

int bn_read_text(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return 0;
    (void)setvbuf(file, NULL, _IONBF, 0); /* one read, into `text` */
    const size_t n = fread(text, 1, size - 1, file);
    text[n] = '\0';
    fclose(file);
    return n > 0;
}

/* Is `controller` an item of a comma-separated list of n characters? */
static int names(const char *list, size_t n, const char *controller) {
    for (const char *end = list + n; list < end;) {
        const size_t item = strcspn(list, ",:");
        if (item == strlen(controller) && memcmp(list, controller, item) == 0)
            return 1;
        list += item + 1;
    }
    return 0;
}

void bn_cgroup_visit(const char *membership, const char *mount, const char *controller,
                     bn_cgroup_visitor visit, void *context) {
    for (const char *line = membership, *end; *line != '\0'; line = *end == '\0' ? end : end + 1) {
        end = line + strcspn(line, "\n");
        /* "id:controllers:/group"; the list of controllers is empty in version 2 */
        const char *controllers = line + strcspn(line, ":\n");
        const char *group = controllers + (*controllers == ':');
        group += strcspn(group, ":\n");
        if (*controllers != ':' || *group != ':')
            continue;
        controllers++;
        const size_t n = (size_t)(group++ - controllers);
        if (n != 0 && !names(controllers, n, controller))
            continue;
        size_t length = (size_t)(end - group);
        length -= length > 0 && group[length - 1] == '/'; /* the root group is "/" */
        char path[PATH_SIZE];
        const int root = snprintf(path, sizeof path, "%s%s%s", mount, n == 0 ? "" : "/",
                                  n == 0 ? "" : controller);
        if (root < 0 || length + (size_t)root >= sizeof path)
            continue;
        memcpy(path + root, group, length);
        path[(size_t)root + length] = '\0';
        for (char *slash = path; slash != NULL;) { /* up to the root group */
            visit(path, n == 0 ? 2 : 1, context);
            slash = strrchr(path + root, '/');
            if (slash != NULL)
                *slash = '\0';
        }
    }
}
