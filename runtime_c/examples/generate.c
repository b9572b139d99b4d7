/* SPDX-License-Identifier: MIT
 *
 * generate.c: continue a text.
 *
 *     example_generate model.bitnet COUNT ID...
 *
 * prints up to COUNT token ids that follow the ids given; fewer if the context fills up. A real
 * program also stops at the model's end tokens (`eos_token_ids` in BN_SECTION_METADATA).
 */
#include "example.h"

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: %s model.bitnet COUNT ID...\n", argv[0]);
        return 2;
    }
    const int32_t count = number(argv[2], 0), n_prompt = argc - 3;
    int32_t *prompt = malloc((size_t)n_prompt * sizeof *prompt);
    if (!prompt)
        check(BN_ERR_MEMORY, "prompt", NULL);
    for (int32_t i = 0; i < n_prompt; i++)
        prompt[i] = number(argv[3 + i], 0);

    bn_model *model = open_model(argv[1]);
    bn_session *session;
    check(bn_session_new(model, NULL, &session), "session", NULL);
    check(bn_session_append(session, prompt, n_prompt, BN_LOGITS_LAST, NULL), "prompt", NULL);

    const bn_sampler sampler = {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f};
    bn_session_seed(session, 1);
    bn_status status = BN_OK;
    for (int32_t i = 0; i < count && !status; i++) {
        int32_t token, n; /* sample and append in one call; n is 1 without a draft */
        status = bn_session_step(session, &sampler, NULL, 0, &token, 1, &n);
        if (!status)
            printf("%d\n", (int)token);
    }
    if (status != BN_ERR_CONTEXT) /* a full context ends the text */
        check(status, "generate", NULL);

    bn_session_free(session);
    bn_model_close(model);
    free(prompt);
    return 0;
}
