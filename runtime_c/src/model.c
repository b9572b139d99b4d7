/* SPDX-License-Identifier: MIT
 *
 * model.c: opens a packed file as typed pointers into it.
 */
#include <stdlib.h>
#include <string.h>

#include "draft.h"
#include "kv.h"
#include "model.h"
#include "system/status.h"

/* Image vectors replace rows of the embedding, or are compared with text vectors: FORMAT.md §2, two
 * stacks. */
static bn_status check_together(const bn_model *m, char *detail) {
    const bn_config *c = &m->stack.config, *v = &m->vision.config;
    const size_t of_image = bn_width(v), of_text = c->image_token ? c->dim : bn_width(c);
    const struct {
        int wrong;
        const char *says;
    } rules[] = {
        {m->file.stacks[0].input == BN_INPUT_IMAGES,
         "the image stack is the first, expected the text stack before it"},
        {c->input != BN_INPUT_TOKENS, "the stack before the image stack takes no tokens"},
        {memcmp(c->name, v->name, sizeof c->name) == 0,
         "the text and image stacks have the same name, expected two names"},
        {c->image_token && (c->mask == BN_MASK_BIDIRECTIONAL || !c->has_head),
         "an image_token, expected also a head, and a mask that is causal or prefix"},
        {!c->image_token && c->has_head, "images and a head, expected an image_token, or no head"},
        {!c->image_token && !(c->pooling && v->pooling),
         "the text or image stack has no pooling, expected both, or an image_token"}};
    if (!bn_reads(m) || !bn_sees(m))
        return BN_OK;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].wrong)
            return bn_fail(detail, BN_ERR_CONFIG, "%s", rules[i].says);
    if (of_text != of_image)
        return bn_fail(detail, BN_ERR_CONFIG, "image vectors have %zu numbers, expected %zu, as %s",
                       of_image, of_text,
                       c->image_token ? "the text stack has" : "text vectors have");
    return BN_OK;
}

static bn_status open_stack(bn_model *m, uint32_t i, char *detail) {
    const uint32_t input = m->file.stacks[i].input;
    const int images = input == BN_INPUT_IMAGES, draft = input == BN_INPUT_DRAFT;
    bn_stack *stack = images ? &m->vision : &m->stack;
    if (draft && (i == 0 || m->file.stacks[i - 1].input != BN_INPUT_TOKENS))
        return bn_fail(detail, BN_ERR_CONFIG,
                       "stack %u is a draft, expected a stack of text before it", (unsigned)i);
    if (stack->layers && !draft)
        return bn_fail(detail, BN_ERR_UNSUPPORTED,
                       "the model has more than one stack that takes %s, which this engine "
                       "cannot run",
                       images ? "images" : "text");
    if (images && m->file.stacks[i].adapters)
        return bn_fail(detail, BN_ERR_UNSUPPORTED,
                       "the model has adapters of images, which this engine cannot run");
    return draft ? bn_draft_open(&m->file, i, &m->kernels, stack, detail)
                 : bn_stack_open(&m->file, i, &m->kernels, stack);
}

/* The only place that knows the role of each stack of a file: at most one for text, with a draft
 * after it, and one for images. */
static bn_status open_stacks(bn_model *m, char *detail) {
    bn_status status = BN_OK;
    for (uint32_t i = 0; i < m->file.n_stacks && !status; i++)
        status = open_stack(m, i, detail);
    return status ? status : check_together(m, detail);
}

static bn_status select_kernels(const char *asked, bn_kernels *kernels, char *detail) {
    const char *set = getenv("BITNET_ISA");
    const char *isa = asked ? asked : set && *set ? set : NULL;
    if (bn_kernels_select(kernels, isa))
        return BN_OK;
    return bn_fail(detail, BN_ERR_ARGUMENT,
                   "%s '%.32s' is not one this machine runs; the best is '%s'",
                   asked ? "isa" : "BITNET_ISA", isa, bn_isa_name(0));
}

static bn_status start_threads(int32_t asked, bn_pool **pool, char *detail) {
    const int32_t threads = asked ? asked : bn_default_threads();
    const bn_status status = bn_pool_new(threads, pool);
    if (status == BN_ERR_THREAD)
        return bn_fail(detail, status, "the system cannot start %d threads: request fewer",
                       (int)threads);
    return status;
}

/* Whether the compiler fuses a product and a sum (FMA contraction), which floats.h cannot
 * detect. */
static int contracts(void) {
    const volatile float a = 1 + 0x1p-12f, square = 1 + 0x1p-11f; /* rounded */
    return a * a - square != 0;
}

/* Fill in a model whose mapping is set. */
static bn_status read_model(bn_model *m, const bn_load_options *o, char *detail) {
    bn_status status;
    if (contracts())
        return bn_fail(detail, BN_ERR_UNSUPPORTED,
                       "this library was compiled so that its results differ from those of "
                       "others; compile it with -ffp-contract=off");
    if ((status = select_kernels(o->isa, &m->kernels, detail)))
        return status;
    if ((status = bn_file_parse(m->mapping.bytes, m->mapping.size, &m->kernels, &m->file, detail)))
        return status;
    if (m->file.adapter_alone)
        return bn_fail(detail, BN_ERR_MODEL,
                       "the file is an adapter, expected the model that it belongs to; open that, "
                       "with this file as its adapter");
    if ((status = open_stacks(m, detail)))
        return status;
    if ((status = start_threads(o->threads, &m->pool, detail)))
        return status;
    if (!o->no_verify && (status = bn_file_verify(&m->file, &m->kernels, m->pool, detail)))
        return status;
    return bn_added_open(&m->file, o, &m->kernels, m->pool, &m->added, &m->n_added, detail);
}

/* Open a model from its bytes. Takes over the mapping, also on failure. */
static bn_status open_mapping(bn_mapping mapping, const bn_load_options *options, bn_model **model,
                              char *detail) {
    const bn_load_options defaults = {0};
    const bn_load_options *o = options ? options : &defaults;
    bn_model *m = calloc(1, sizeof *m);
    if (!m) {
        bn_mapping_close(&mapping);
        return BN_ERR_MEMORY;
    }
    atomic_init(&m->users, 1);
    m->mapping = mapping;
    m->budget.most = o->cache_bytes;
    m->image_kv_type = bn_kv_types[o->image_kv_type].of_images;
    const bn_status status = read_model(m, o, detail);
    if (status)
        bn_model_close(m);
    else
        *model = m;
    return status;
}

/* `detail` starts empty, so that `explain` can tell whether anything was written to it. */
static void begin(char *detail) {
    if (detail)
        *detail = '\0';
}

static bn_status explain(bn_status status, char *detail) {
    return status && detail && !*detail ? bn_fail(detail, status, "%s", bn_status_text(status))
                                        : status;
}

static bn_status check_options(const bn_load_options *o, char *detail) {
    if (!o)
        return BN_OK;
    if (o->threads < 0 || o->threads > BN_MOST_THREADS)
        return bn_fail(detail, BN_ERR_ARGUMENT, "threads is %d, expected 0 (automatic) to %d",
                       (int)o->threads, BN_MOST_THREADS);
    if (o->n_adapters < 0 || o->n_adapters > BN_MOST_ADAPTERS)
        return bn_fail(detail, BN_ERR_ARGUMENT, "n_adapters is %d, expected 0 to %d",
                       (int)o->n_adapters, BN_MOST_ADAPTERS);
    if (!bn_kv_name(o->image_kv_type))
        return bn_fail(detail, BN_ERR_ARGUMENT, "image_kv_type is %d, expected 0 to %d",
                       (int)o->image_kv_type, BN_KV_TYPES - 1);
    for (int32_t i = 0; i < o->n_adapters; i++)
        if (!o->adapters || !o->adapters[i])
            return bn_fail(detail, BN_ERR_ARGUMENT, "adapter %d: its path is NULL", (int)i + 1);
    return BN_OK;
}

bn_status bn_model_open(const char *path, const bn_load_options *options, bn_model **model,
                        char *detail) {
    BN_STANDARD_FLOATS;
    bn_mapping mapping;
    bn_status status;
    begin(detail);
    if (!path || !model)
        return bn_fail(detail, BN_ERR_ARGUMENT, "path and model must not be NULL");
    if ((status = check_options(options, detail)))
        return status;
    status = bn_mapping_open(path, options && options->no_mmap, &mapping, detail);
    if (!status)
        status = open_mapping(mapping, options, model, detail);
    return explain(status, detail);
}

bn_status bn_model_open_bytes(const void *bytes, size_t size, const bn_load_options *options,
                              bn_model **model, char *detail) {
    BN_STANDARD_FLOATS;
    bn_status status;
    begin(detail);
    if (!bytes || !model || (uintptr_t)bytes % 64 != 0)
        return bn_fail(detail, BN_ERR_ARGUMENT,
                       "bytes and model must not be NULL, and bytes 64-byte aligned");
    if ((status = check_options(options, detail)))
        return status;
    const bn_mapping mapping = {.bytes = bytes, .size = size, .mapped = -1};
    return explain(open_mapping(mapping, options, model, detail), detail);
}

void bn_model_join(bn_model *m) {
    atomic_fetch_add(&m->users, 1);
}

void bn_model_leave(bn_model *m) {
    if (atomic_fetch_sub(&m->users, 1) > 1)
        return;
    bn_pool_free(m->pool);
    free(m->work); /* of sessions that a forked child inherited */
    bn_stack_close(&m->stack);
    bn_stack_close(&m->vision);
    bn_added_close(m->added, m->n_added);
    bn_file_close(&m->file);
    bn_mapping_close(&m->mapping);
    free(m);
}

void bn_model_close(bn_model *m) {
    if (m)
        bn_model_leave(m);
}

size_t bn_most_rank(const bn_model *m, const bn_stack *stack) {
    size_t most = stack->own.rank;
    for (int32_t i = 0; i < m->n_added && stack == &m->stack; i++)
        most = bn_max(most, m->added[i].adapter.rank);
    return most;
}
