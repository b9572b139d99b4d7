/* SPDX-License-Identifier: MIT
 *
 * batch.c: several texts at once. Each is a line of token ids on stdin:
 *
 *     echo '1 2 3
 *     7 7' | example_batch model.bitnet COUNT
 *
 * prints a line of COUNT more for each. The weights are read once for all texts, so several cost
 * little more than one, and each text is what it would be alone.
 */
#include "example.h"
#include <string.h>

enum { MOST_TEXTS = 16, LINE = 1 << 16 };

/* A session that holds the ids of a line; NULL when there are none. */
static bn_session *read_text(bn_model *model, char *line) {
    bn_session *session = NULL;
    for (char *word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n")) {
        const int32_t token = number(word, 0);
        if (!session)
            check(bn_session_new(model, NULL, &session), "session", NULL);
        check(bn_session_append(session, &token, 1, BN_LOGITS_LAST, NULL), "text", NULL);
    }
    return session;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s model.bitnet COUNT < lines of token ids\n", argv[0]);
        return 2;
    }
    const int32_t count = number(argv[2], 0);
    bn_model *model = open_model(argv[1]);
    static char line[LINE];
    bn_session *texts[MOST_TEXTS], *open[MOST_TEXTS]; /* open: of these, those with room left */
    int32_t prompts[MOST_TEXTS], tokens[MOST_TEXTS], n = 0;
    while (n < MOST_TEXTS && fgets(line, sizeof line, stdin))
        if ((texts[n] = read_text(model, line)) != NULL) {
            prompts[n] = bn_session_position(texts[n]);
            n++;
        }

    for (int32_t made = 0; made < count; made++) {
        int32_t n_open = 0;
        for (int32_t i = 0; i < n; i++)
            if (bn_session_position(texts[i]) < bn_session_context(texts[i]))
                open[n_open++] = texts[i];
        if (n_open == 0)
            break;
        for (int32_t i = 0; i < n_open; i++) /* the most likely */
            check(bn_session_sample(open[i], NULL, &tokens[i]), "sample", NULL);
        check(bn_append_batch(open, tokens, n_open), "batch", NULL);
    }

    for (int32_t i = 0; i < n; i++) {
        const int32_t *held = bn_session_tokens(texts[i]);
        for (int32_t t = prompts[i]; t < bn_session_position(texts[i]); t++)
            printf("%s%d", t > prompts[i] ? " " : "", (int)held[t]);
        printf("\n");
        bn_session_free(texts[i]);
    }
    bn_model_close(model);
    return 0;
}
