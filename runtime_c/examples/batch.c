/* SPDX-License-Identifier: MIT
 *
 * batch.c: continue several texts at once. Each is a line of token ids on stdin:
 *
 *     echo '1 2 3
 *     7 7' | example_batch model.bitnet COUNT
 *
 * prints for each a line of up to COUNT further ids, for at most 16 texts. The weights are read
 * once for all texts, so several cost little more than one, and each text comes out as it would
 * alone.
 */
#include "example.h"
#include <string.h>

enum { MOST_TEXTS = 16, LINE = 1 << 16, AT_ONCE = 8 };

#define BLANK " \t\n"

typedef struct text {
    bn_session *session;
    int32_t ids[LINE / 2]; /* from the line */
    int32_t n, made;
    int32_t chosen[AT_ONCE], last; /* last: chosen, but not appended yet */
} text;

/* Returns 0 at the end of stdin; ends the program if a line is too long. */
static int read_line(char *line) {
    if (!fgets(line, LINE, stdin))
        return 0;
    if (strlen(line) == LINE - 1 && line[LINE - 2] != '\n') {
        fprintf(stderr, "a line has more than %d characters\n", LINE - 2);
        exit(2);
    }
    return 1;
}

static void read_text(bn_model *model, char *line, text *t) {
    for (char *word = strtok(line, BLANK); word; word = strtok(NULL, BLANK))
        t->ids[t->n++] = number(word, 0);
    if (t->n > 0)
        check(bn_session_new(model, NULL, &t->session), "session", NULL);
}

/* The text's entry in the next pass: first its line, then the token chosen last. The most likely
 * tokens are chosen; with a draft, a pass may give several. */
static bn_entry next_of(text *t, int32_t count) {
    const int32_t left = count - t->made;
    return (bn_entry){.session = t->session,
                      .tokens = t->made ? &t->last : t->ids,
                      .n_tokens = t->made ? 1 : t->n,
                      .most = left < AT_ONCE ? left : AT_ONCE,
                      .chosen = t->chosen};
}

/* One or more tokens for each text that is not done and has room. Returns the number of such
 * texts. */
static int32_t pass(text *texts, int32_t n, int32_t count) {
    bn_entry entries[MOST_TEXTS];
    text *of[MOST_TEXTS];
    int32_t going = 0;
    for (text *t = texts; t < texts + n; t++)
        if (t->made < count && bn_session_position(t->session) < bn_session_context(t->session)) {
            of[going] = t;
            entries[going++] = next_of(t, count);
        }
    if (going > 0)
        check(bn_step_batch(entries, going), "text", NULL);
    for (int32_t i = 0; i < going; i++) {
        of[i]->made += entries[i].n_chosen;
        of[i]->last = of[i]->chosen[entries[i].n_chosen - 1];
    }
    return going;
}

static void print(const text *t) {
    const int32_t *held = bn_session_tokens(t->session);
    for (int32_t i = 0; i + 1 < t->made; i++)
        printf("%d ", (int)held[t->n + i]);
    if (t->made > 0)
        printf("%d", (int)t->last);
    printf("\n");
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s model.bitnet COUNT < lines of token ids\n", argv[0]);
        return 2;
    }
    const int32_t count = number(argv[2], 0);
    bn_model *model = open_model(argv[1]);
    static char line[LINE];
    static text texts[MOST_TEXTS];
    int32_t n = 0;
    while (n < MOST_TEXTS && read_line(line)) {
        read_text(model, line, &texts[n]);
        n += texts[n].n > 0;
    }
    while (read_line(line))
        if (line[strspn(line, BLANK)]) {
            fprintf(stderr, "more than %d lines with token ids\n", MOST_TEXTS);
            return 2;
        }
    while (pass(texts, n, count) > 0)
        continue;
    for (int32_t i = 0; i < n; i++) {
        print(&texts[i]);
        bn_session_free(texts[i].session);
    }
    bn_model_close(model);
    return 0;
}
