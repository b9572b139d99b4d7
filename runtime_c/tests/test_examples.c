/* SPDX-License-Identifier: MIT
 *
 * test_examples.c: the programs of runtime_c/examples do what they promise, on a small model.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, mkstemp, kill */

#include "bitnet_runtime.h"
#include "tiny_file.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { VOCAB = 19, COUNT = 12, LONG = 1 << 22 };

static char path[] = "/tmp/bitnet_examples_XXXXXX";

/* A running program; its stdout and stderr are read from `out`. */
typedef struct program {
    pid_t pid;
    FILE *out;
} program;

static program start(const char *name, const char *const *arguments, const char *input) {
    char file[4096];
    const char *argv[16] = {file};
    int to[2], from[2];
    snprintf(file, sizeof file, "%s%s", EXAMPLES, name);
    for (int i = 0; i < 14 && arguments[i]; i++)
        argv[i + 1] = arguments[i];
    CHECK(pipe(to) == 0 && pipe(from) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        dup2(from[1], 2);
        close(to[1]);
        close(from[0]);
        execv(file, (char **)(uintptr_t)argv);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    CHECK_EQ(write(to[1], input, strlen(input)), strlen(input));
    close(to[1]);
    return (program){pid, fdopen(from[0], "r")};
}

/* Read its output to the end, the first `size` bytes of it into `said`; returns its exit status. */
static int finish(program p, char *said, size_t size) {
    int status;
    const size_t n = fread(said, 1, size - 1, p.out);
    said[n] = '\0';
    while (fgetc(p.out) != EOF)
        continue;
    fclose(p.out);
    CHECK_EQ(waitpid(p.pid, &status, 0), p.pid);
    CHECK_MSG(WIFEXITED(status), "ended by a signal: %s", said);
    return WEXITSTATUS(status);
}

static bn_session *prompted(bn_model *model, const int32_t *prompt, int32_t n) {
    bn_session *s;
    CHECK_EQ(bn_session_new(model, NULL, &s), BN_OK);
    CHECK_EQ(bn_session_append(s, prompt, n, BN_LOGITS_LAST, NULL), BN_OK);
    return s;
}

static void test_generate(bn_model *model) {
    const bn_sampler sampler = {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f};
    char expected[1024] = "", said[1024];
    bn_session *s = prompted(model, (int32_t[]){1, 2, 3}, 3);
    bn_session_seed(s, 1);
    for (int i = 0; i < COUNT; i++) {
        int32_t token;
        CHECK_EQ(bn_session_sample(s, &sampler, &token), BN_OK);
        CHECK_EQ(bn_session_append(s, &token, 1, BN_LOGITS_LAST, NULL), BN_OK);
        snprintf(expected + strlen(expected), 16, "%d\n", (int)token);
    }
    bn_session_free(s);
    const char *const good[] = {path, "12", "1", "2", "3", NULL};
    CHECK_EQ(finish(start("generate", good, ""), said, sizeof said), 0);
    CHECK_MSG(strcmp(said, expected) == 0, "%s, expected %s", said, expected);

    static const struct {
        const char *arguments[6];
        int status;
        const char *says;
    } wrong[] = {
        {{path, "12"}, 2, "usage: "},
        {{path, "12", "x"}, 2, "'x' is not a number"},
        {{path, "-1", "1"}, 2, "'-1' is not a number"},
        {{path, "12", "99999999999"}, 2, "'99999999999' is not a number"},
        {{path, "12", "19"}, 1, "prompt: a token id outside the vocabulary"},
        {{"/none/such", "12", "1"}, 1, "/none/such: the file could not be opened or read: stat: "},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_EQ(finish(start("generate", wrong[i].arguments, ""), said, sizeof said),
                 wrong[i].status);
        CHECK_MSG(strstr(said, wrong[i].says) != NULL, "%s", said);
    }
}

static void test_batch(bn_model *model) {
    static const int32_t prompts[3][4] = {{7}, {1, 2, 3}, {18, 0, 4, 4}};
    static const int32_t lengths[3] = {1, 3, 4};
    char expected[1024] = "", said[1024];
    for (int i = 0; i < 3; i++) {
        bn_session *s = prompted(model, prompts[i], lengths[i]);
        for (int t = 0; t < COUNT; t++) {
            int32_t token;
            CHECK_EQ(bn_session_sample(s, NULL, &token), BN_OK);
            CHECK_EQ(bn_session_append(s, &token, 1, BN_LOGITS_LAST, NULL), BN_OK);
            snprintf(expected + strlen(expected), 16, "%s%d", t ? " " : "", (int)token);
        }
        snprintf(expected + strlen(expected), 16, "\n");
        bn_session_free(s);
    }
    const char *const good[] = {path, "12", NULL};
    CHECK_EQ(finish(start("batch", good, "7\n1 2 3\n\n18 0 4 4\n"), said, sizeof said), 0);
    CHECK_MSG(strcmp(said, expected) == 0, "%s, expected %s", said, expected);
    CHECK_EQ(finish(start("batch", good, "7\n1 2 19\n"), said, sizeof said), 1);
    CHECK_MSG(strstr(said, "text: a token id outside the vocabulary") != NULL, "%s", said);
}

/* Without the signal it would run for four million tokens. */
static void test_stream(void) {
    const char *const arguments[] = {path, "1", "2", NULL};
    char said[1 << 16];
    const program p = start("stream", arguments, "");
    for (int i = 0; i < 3; i++)
        CHECK(fgets(said, sizeof said, p.out) != NULL);
    CHECK_EQ(kill(p.pid, SIGINT), 0);
    int stopped = 0, after = 0;
    while (fgets(said, sizeof said, p.out)) {
        after += stopped;
        stopped |= strncmp(said, "stopped after ", 14) == 0;
    }
    CHECK_EQ(finish(p, said, sizeof said), 0);
    CHECK(stopped && after == 4);
}

int main(void) {
    size_t size;
    uint8_t *file = tiny_file(tiny_decoder, SIZE_MAX, SIZE_MAX, &size);
    bn_model *model;
    tiny_put(file + tiny_section(file, 1) + 4 * 9, LONG, 4); /* max_context */
    tiny_fix_checksums(file, size);
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, file, size) == (ssize_t)size && close(fd) == 0);
    CHECK_EQ(bn_model_open(path, NULL, &model, NULL), BN_OK);
    test_generate(model);
    test_batch(model);
    test_stream();
    bn_model_close(model);
    CHECK_EQ(unlink(path), 0);
    free(file);
    return 0;
}
