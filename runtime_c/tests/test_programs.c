/* SPDX-License-Identifier: MIT
 *
 * test_programs.c: random sequences of calls on texts that share memory: append, step with drafts,
 * passes over several texts, fork, rewind, batch, save and load, free. Whatever was called, a text
 * equals what single tokens give in a session that shares nothing, with and without a draft of the
 * model, with any adapter. The cache has a budget that the programs exceed: then nothing is lost.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, mkstemp */

#include <unistd.h>

#include "mask_model.h"

enum { ADAPTERS = 2 };
static char paths[ADAPTERS][32];
static const char *const adapters[ADAPTERS] = {paths[0], paths[1]};
static int32_t n_adapters; /* adapters of the models */

enum {
    TEXTS = 5,
    CALLS = 140,
    CHECKED = 8 /* how many calls are followed by a check */,
    BATCH = 90,
    PART = 3 /* each tier with each type computes one of so many models */
};

/* With the second sampler the model's draft guesses most tokens, as noise decides. The third makes
 * the text repeat itself. */
static const int32_t favoured[] = {7, 8};
static const float favours[] = {60, 55};
enum { SAMPLERS = 3 };
static const bn_sampler samplers[SAMPLERS] = {
    {.temperature = 1.2f, .top_k = 20},
    {.temperature = 40},
    {.temperature = 1, .n_bias = 2, .bias_tokens = favoured, .bias_values = favours}};

/* A text, and for each sampled token its sampler and seed. */
typedef struct mirror {
    bn_session *s;
    int32_t tokens[TEXT], seeds[TEXT]; /* 0: not sampled */
    const bn_sampler *samplers[TEXT];
    int32_t n;
} mirror;

static mirror texts[TEXTS];
static bn_model *single;            /* the same file; its sessions share nothing */
static int32_t full;                /* calls for which there was no room */
static int32_t refused;             /* texts of a batch that were refused */
static int32_t right;               /* right guesses in a batch */
static int32_t went_on;             /* batches that had more than one pass */
static int32_t long_ones[SAMPLERS]; /* steps that gave more tokens without a draft from the
                                     * caller */

static void check(const mirror *m, int32_t type) {
    const bn_session_options o = {
        .kv_type = type, .batch = 4096, .adapter = bn_session_adapter(m->s)};
    bn_session *s;
    CHECK_EQ(bn_session_position(m->s), m->n);
    CHECK(memcmp(bn_session_tokens(m->s), m->tokens, (size_t)m->n * sizeof *m->tokens) == 0);
    if (!bn_session_logits(m->s)) /* it was just rewound */
        return;
    ok(bn_session_new(single, &o, &s));
    for (int32_t i = 0; i < m->n; i++) {
        if (m->seeds[i]) {
            int32_t token;
            bn_session_seed(s, (uint64_t)m->seeds[i]);
            ok(bn_session_sample(s, m->samplers[i], &token));
            CHECK_EQ(token, m->tokens[i]);
        }
        ok(bn_session_append(s, &m->tokens[i], 1, BN_LOGITS_LAST, NULL));
    }
    CHECK(memcmp(bn_session_logits(s), bn_session_logits(m->s), VOCAB * sizeof(float)) == 0);
    bn_session_free(s);
}

static void drop(mirror *m) {
    bn_session_free(m->s);
    *m = (mirror){0};
}

/* Whether a call succeeded. If there was no room for it, one of the other texts ends. */
static int done(bn_status status, const mirror *m, int32_t before, uint64_t *random) {
    if (status != BN_ERR_CACHE) {
        ok(status);
        return 1;
    }
    CHECK_EQ(bn_session_position(m->s), before);
    full++;
    for (;;) {
        mirror *other = &texts[check_below(random, TEXTS)];
        if (other != m && other->s) {
            drop(other);
            return 0;
        }
    }
}

static void append(mirror *m, uint64_t *random) {
    int32_t n = 1 + (int32_t)check_below(random, 1 + check_below(random, 200));
    n = n < TEXT - m->n ? n : TEXT - m->n;
    for (int32_t i = 0; i < n; i++)
        m->tokens[m->n + i] = (int32_t)check_below(random, VOCAB);
    if (n < 1 ||
        !done(bn_session_append(m->s, m->tokens + m->n, n, BN_LOGITS_LAST, NULL), m, m->n, random))
        return;
    memset(m->seeds + m->n, 0, (size_t)n * sizeof *m->seeds);
    m->n += n;
}

/* Guesses of what follows some tokens, most of them right, found with a forked session. Returns how
 * many. */
static int32_t find_guesses(const bn_session *s, const int32_t *tokens, int32_t n_tokens,
                            const bn_sampler *sampler, int32_t seed, int32_t *guesses, int32_t n,
                            uint64_t *random) {
    bn_session *guide;
    int32_t found = 0, one;
    ok(bn_session_fork(s, &guide));
    bn_session_seed(guide, (uint64_t)seed);
    if (n_tokens > 0 && bn_session_append(guide, tokens, n_tokens, BN_LOGITS_LAST, NULL))
        n = 0; /* there is no room */
    for (; found < n && !bn_session_step(guide, sampler, NULL, 0, &guesses[found], 1, &one);
         found++)
        guesses[found] = check_below(random, 6) ? guesses[found] : 0;
    bn_session_free(guide);
    return found;
}

/* Several tokens, with a draft or with the engine's guesses. */
static void step(mirror *m, uint64_t *random) {
    int32_t draft[8], tokens[8], n;
    const bn_sampler *sampler = &samplers[check_below(random, SAMPLERS)];
    const int32_t seed = 1 + (int32_t)check_below(random, 1000);
    if (m->n + 8 > TEXT || !bn_session_logits(m->s))
        return;
    bn_session_seed(m->s, (uint64_t)seed);
    const int32_t guesses =
        find_guesses(m->s, NULL, 0, sampler, seed, draft, (int32_t)check_below(random, 9), random);
    model->timings = (bn_timings){0}; /* so that guesses are worth it */
    if (!done(bn_session_step(m->s, sampler, draft, guesses, tokens, 8, &n), m, m->n, random))
        return;
    long_ones[sampler - samplers] += n > 1 && guesses == 0;
    for (int32_t i = 0; i < n; i++) {
        m->samplers[m->n] = sampler;
        m->seeds[m->n] = seed;
        m->tokens[m->n++] = tokens[i];
    }
}

static void fork_text(const mirror *m, uint64_t *random) {
    mirror *to = &texts[check_below(random, TEXTS)];
    if (to == m)
        return;
    const uint64_t before = bn_model_cache_bytes(model);
    if (to->s)
        drop(to);
    *to = *m;
    ok(bn_session_fork(m->s, &to->s));
    CHECK(bn_model_cache_bytes(model) <= before);
}

static void rewind_text(mirror *m, uint64_t *random) {
    const int32_t least = bn_session_rewind_least(m->s);
    const int32_t n = check_below(random, 9)
                          ? least + (int32_t)check_below(random, (size_t)(m->n - least) + 1)
                          : 0;
    ok(bn_session_rewind(m->s, n));
    m->n = n;
}

/* Save and load a text: its new memory shares nothing. */
static void save_text(mirror *m, uint64_t *random) {
    const uint64_t size = bn_session_saved_size(m->s, 0);
    uint8_t *bytes = malloc(size);
    bn_session *back;
    CHECK(bytes != NULL);
    ok(bn_session_save(m->s, NULL, 0, bytes, size));
    if (done(bn_session_load(model, bytes, size, &back, NULL, NULL, NULL), m, m->n, random)) {
        bn_session_free(m->s);
        m->s = back;
    }
    free(bytes);
}

enum { LONGEST = 12, PIECE = 200 };

/* The part of a text in a pass. */
typedef struct going {
    mirror *m;
    int32_t tokens[PIECE], draft[LONGEST], chosen[LONGEST], seed;
} going;

static bn_entry enter(going *g, mirror *m, float moment, uint64_t *random) {
    const int32_t room = TEXT - m->n, longest = check_below(random, 3) ? 1 : PIECE;
    *g = (going){.m = m, .seed = 1 + (int32_t)check_below(random, 1000)};
    bn_entry e = {.session = m->s,
                  .tokens = g->tokens,
                  .n_tokens = 1 + (int32_t)check_below(random, (size_t)longest),
                  .most = (int32_t)check_below(random, LONGEST),
                  .moment = moment,
                  .sampler = &samplers[check_below(random, SAMPLERS)],
                  .draft = g->draft,
                  .chosen = g->chosen};
    for (int32_t i = 0; i < e.n_tokens; i++)
        g->tokens[i] = (int32_t)check_below(random, VOCAB);
    if (e.n_tokens == 1 && e.sampler == &samplers[2])
        g->tokens[0] = favoured[0];
    bn_session_seed(m->s, (uint64_t)g->seed);
    if (e.n_tokens == 1 && room > 2 * LONGEST && check_below(random, 2))
        e.n_draft = find_guesses(m->s, g->tokens, 1, e.sampler, g->seed, g->draft,
                                 (int32_t)check_below(random, LONGEST), random);
    if (check_below(random, 20) == 0)
        bn_session_cancel(m->s);
    return e;
}

/* Update a text after the pass: unchanged, or with the tokens and all chosen ones but the last. */
static void leave(const going *g, const bn_entry *e) {
    mirror *m = g->m;
    int32_t token;
    if (e->status) {
        CHECK(e->status == BN_ERR_CACHE ||
              e->status == (bn_session_cancelled(m->s) ? BN_ERR_CANCELLED : BN_ERR_CONTEXT));
        full += e->status == BN_ERR_CACHE;
        refused++;
        m->n = bn_session_position(m->s) > m->n ? m->n : bn_session_position(m->s);
        ok(bn_session_rewind(m->s, m->n));
        return;
    }
    CHECK(e->n_chosen <= e->most && (e->n_chosen > 0) == (e->most > 0));
    for (int32_t i = 0; i < e->n_tokens; i++) {
        m->seeds[m->n] = 0;
        m->tokens[m->n++] = g->tokens[i];
    }
    for (int32_t i = 0; i + 1 < e->n_chosen; i++) {
        m->samplers[m->n] = e->sampler;
        m->seeds[m->n] = g->seed;
        m->tokens[m->n++] = g->chosen[i];
    }
    right += e->n_chosen > 1 ? e->n_chosen - 1 : 0;
    long_ones[e->sampler - samplers] += e->n_chosen > 1 && e->n_draft == 0 && e->moment <= 0;
    if (e->most > 0) {
        ok(bn_session_sample(m->s, e->sampler, &token));
        CHECK_EQ(token, e->chosen[e->n_chosen - 1]);
    }
}

/* A pass over pieces of prompts, and tokens followed by guesses. */
static void pass(uint64_t *random) {
    static going all[TEXTS];
    bn_entry entries[TEXTS];
    const float moment = (float)check_below(random, 2);
    int32_t n = 0;
    for (mirror *m = texts; m < texts + TEXTS; m++)
        if (m->s && check_below(random, 4)) {
            entries[n] = enter(&all[n], m, moment, random);
            n++;
        }
    if (n == 0)
        return;
    model->timings = (bn_timings){0};
    const bn_status status = bn_step_batch(entries, n);
    bn_status first = BN_OK;
    for (int32_t i = 0; i < n; i++) {
        first = first ? first : entries[i].status;
        leave(&all[i], &entries[i]);
    }
    CHECK_EQ(status, first);
    went_on += n > 1 && moment > 0 && entries[0].n_chosen > 1 && entries[0].n_draft == 0;
}

static void run_program(uint64_t seed, const char *isa, int32_t threads, int32_t type) {
    /* With sanitizers, the scalar kernels take nine tenths of the total time. */
    const int32_t calls = SANITIZED && strcmp(isa, "scalar") == 0 ? CALLS / 7 : CALLS;
    bn_model_info info;
    ok(bn_model_get_info(single, &info));
    const uint64_t token = info.kv_bytes_per_token[type] + info.kv_window_bytes_per_token[type];
    const bn_load_options options = {.threads = threads,
                                     .isa = isa,
                                     .cache_bytes = 700 * token,
                                     .n_adapters = n_adapters,
                                     .adapters = adapters};
    bn_session_options o = {.kv_type = type, .batch = 1 + (int32_t)(seed * 37 % BATCH)};
    uint64_t random = seed;
    ok(bn_model_open_bytes(file, file_size, &options, &model, NULL));
    for (int32_t call = 0; call < calls; call++) {
        mirror *m = &texts[check_below(&random, TEXTS)];
        if (!m->s) {
            o.adapter = n_adapters > 0 ? (int32_t)check_below(&random, ADAPTERS + 1) : 0;
            ok(bn_session_new(model, &o, &m->s));
        }
        switch (check_below(&random, 10)) {
        case 0:
        case 1:
            append(m, &random);
            break;
        case 2:
            step(m, &random);
            break;
        case 3:
            fork_text(m, &random);
            break;
        case 4:
            rewind_text(m, &random);
            break;
        case 5:
            save_text(m, &random);
            break;
        default:
            pass(&random);
        }
        CHECK(bn_model_cache_bytes(model) <= options.cache_bytes);
        if (m->s && call % (CALLS / CHECKED) == 0) /* it may have been dropped for lack of room */
            check(m, type);
    }
    for (mirror *m = texts; m < texts + TEXTS; m++) {
        if (m->s)
            check(m, type);
        drop(m);
    }
    CHECK_EQ(bn_model_cache_bytes(model), 0);
    bn_model_close(model);
}

/* Adapters of the model, with different ranks. */
static void write_adapters(void) {
    for (uint32_t i = 0; i < ADAPTERS; i++) {
        size_t size;
        kind.rank = 3 + 6 * i;
        uint8_t *bytes = tiny_adapter(recipe, file, i, &size);
        strcpy(paths[i], "/tmp/bitnet_programs_XXXXXX");
        const int fd = mkstemp(paths[i]);
        CHECK(fd >= 0 && write(fd, bytes, size) == (ssize_t)size && close(fd) == 0);
        free(bytes);
    }
    kind.rank = 0;
}

static void test_programs(uint32_t window, uint32_t global_every, uint32_t draft) {
    static int32_t n_models;
    kind.draft = draft;
    begin(BN_MASK_CAUSAL, window, global_every);
    if (n_adapters > 0) {
        write_adapters();
        const bn_load_options options = {
            .threads = 2, .n_adapters = n_adapters, .adapters = adapters};
        bn_model_close(model);
        ok(bn_model_open_bytes(file, file_size, &options, &model, NULL));
    }
    single = model;
    for (int32_t tier = 0; bn_isa_name(tier); tier++)
        for (int32_t type = 0; type < BN_KV_TYPES; type++)
            if ((tier + type + n_models) % PART == 1)
                run_program((uint64_t)(10 * tier + type) + window, bn_isa_name(tier), 1 + type % 3,
                            type);
    n_models++;
    model = single;
    end();
    for (int32_t i = 0; i < n_adapters; i++)
        unlink(paths[i]);
}

int main(void) {
    int32_t enough = 0; /* scaled by the number of tiers, which depends on the CPU */
    for (int32_t tier = 0; bn_isa_name(tier); tier++)
        enough += 5;
    enough /= PART;
    test_programs(0, 0, 0);
    test_programs(20, 2, 0);
    CHECK_MSG(long_ones[2] > enough, "a repetition was right only %d times", long_ones[2]);
    memset(long_ones, 0, sizeof long_ones);
    test_programs(0, 0, 1);
    test_programs(20, 2, 1);
    n_adapters = ADAPTERS;
    test_programs(20, 2, 1);
    CHECK_MSG(refused > enough && right > 10 * enough, "%d texts stayed out, %d guesses came true",
              refused, right);
    CHECK_MSG(went_on > enough, "texts went on together only %d times", went_on);
    CHECK_MSG(full > enough, "the budget was exceeded only %d times", full);
    CHECK_MSG(long_ones[1] > enough && long_ones[2] > enough,
              "the draft was right only %d times, a repetition %d", long_ones[1], long_ones[2]);
    return 0;
}
