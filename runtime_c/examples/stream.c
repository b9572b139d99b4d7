/* SPDX-License-Identifier: MIT
 *
 * stream.c: print tokens as they are generated, until Ctrl-C.
 *
 *     example_stream model.bitnet ID...
 *
 * Ctrl-C ends the generation within one token, but not the program, which shows how to reuse the
 * session: it generates four more tokens.
 */
#define _POSIX_C_SOURCE 200809L /* sigaction */

#include "example.h"
#include <signal.h>

static bn_session *running; /* set before the handler is installed */

static void interrupt(int signal_number) {
    (void)signal_number;
    bn_session_cancel(running); /* allowed in a signal handler, as in any thread */
}

/* Print up to `count` tokens one by one. */
static bn_status generate(bn_session *session, int32_t count) {
    const bn_sampler sampler = {.temperature = 0.8f, .top_k = 40};
    for (int32_t i = 0; i < count; i++) {
        int32_t token, n;
        const bn_status status = bn_session_step(session, &sampler, NULL, 0, &token, 1, &n);
        if (status)
            return status;
        printf("%d\n", (int)token);
        fflush(stdout);
    }
    return BN_OK;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s model.bitnet ID...\n", argv[0]);
        return 2;
    }
    bn_model *model = open_model(argv[1]);
    check(bn_session_new(model, NULL, &running), "session", NULL);
    for (int i = 2; i < argc; i++) {
        const int32_t token = number(argv[i], 0);
        check(bn_session_append(running, &token, 1, BN_LOGITS_LAST, NULL), "prompt", NULL);
    }
    const struct sigaction action = {.sa_handler = interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);

    bn_status status = generate(running, INT32_MAX);
    if (status == BN_ERR_CANCELLED) { /* the session stays cancelled until it is rewound */
        signal(SIGINT, SIG_DFL);
        const int32_t held = bn_session_position(running);
        fprintf(stderr, "stopped after %d tokens\n", (int)held - (argc - 2));
        const int32_t last = bn_session_tokens(running)[held - 1];
        check(bn_session_rewind(running, held - 1), "rewind", NULL);
        check(bn_session_append(running, &last, 1, BN_LOGITS_LAST, NULL), "last token", NULL);
        status = generate(running, 4);
    }
    if (status != BN_ERR_CONTEXT)
        check(status, "generate", NULL);
    signal(SIGINT, SIG_DFL); /* nothing to cancel from here on */
    bn_session_free(running);
    bn_model_close(model);
    return 0;
}
