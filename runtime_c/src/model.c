/* SPDX-License-Identifier: MIT
 *
 * model.c: from a packed file to typed pointers into it, ready to run.
 */
#include <stdlib.h>

#include "file_sketch.h"
#include "internal.h"

enum { NO_LAYER = 0xFFFF };

/* What a file may say and this engine does not do yet, each by name. */
static bn_status check_supported(const bn_file *f, char *detail) {
    const bn_config *c = &f->config;
    const struct {
        int refused;
        const char *what;
    } limits[] = {
        {f->n_stacks != 1, "more than one stack"},
        {c->input != 0, "input = embeddings"},
        {c->mask != 0, "a mask other than causal"},
        {c->norm != 0, "norm = layer"},
        {(c->norm_flags & BN_NORM_BIAS) != 0, "norm_bias"},
        {c->n_experts != 0, "experts (MoE)"},
        {c->position != 0 && c->position != 3, "positions other than rope and none"},
    };
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
        if (limits[i].refused)
            return bn_fail(detail, BN_ERR_UNSUPPORTED,
                           "the model has %s, which this engine cannot run", limits[i].what);
    return BN_OK;
}

static const float *gain(const bn_file *f, uint32_t layer, uint32_t role) {
    return (const float *)(const void *)bn_file_tensor(f, layer, role).data;
}

static void resolve_layer(const bn_file *f, uint32_t i, bn_layer *l) {
    const uint32_t every = f->config.global_every;
    const int global = every > 0 && (i + 1) % every == 0;
    *l = (bn_layer){
        .window = global ? 0 : f->config.sliding_window,
        .table = every > 0 && !global,
        .attn_norm = gain(f, i, BN_ATTN_NORM),
        .q_norm = gain(f, i, BN_Q_NORM),
        .k_norm = gain(f, i, BN_K_NORM),
        .attn_sub_norm = gain(f, i, BN_ATTN_SUB_NORM),
        .attn_post_norm = gain(f, i, BN_ATTN_POST_NORM),
        .ffn_norm = gain(f, i, BN_FFN_NORM),
        .ffn_sub_norm = gain(f, i, BN_FFN_SUB_NORM),
        .ffn_post_norm = gain(f, i, BN_FFN_POST_NORM),
        .q = bn_file_tensor(f, i, BN_Q),
        .k = bn_file_tensor(f, i, BN_K),
        .v = bn_file_tensor(f, i, BN_V),
        .o = bn_file_tensor(f, i, BN_O),
        .gate = bn_file_tensor(f, i, BN_GATE),
        .up = bn_file_tensor(f, i, BN_UP),
        .down = bn_file_tensor(f, i, BN_DOWN),
    };
}

static bn_status resolve(bn_model *m) {
    const bn_file *f = &m->file;
    m->config = f->config;
    bn_gate *const gates[] = {[BN_ACT_RELU2] = m->kernels.relu2_gate,
                              [BN_ACT_SILU] = m->kernels.silu_gate,
                              [BN_ACT_GELU] = m->kernels.gelu_gate,
                              [BN_ACT_RELU] = m->kernels.relu_gate};
    m->gate = gates[m->config.activation];
    m->layers = calloc(m->config.n_layers, sizeof *m->layers); /* each has records in the file */
    if (!m->layers)
        return BN_ERR_MEMORY;
    for (uint32_t i = 0; i < m->config.n_layers; i++)
        resolve_layer(f, i, &m->layers[i]);
    for (size_t i = 0; i < f->n_tensors; i++)
        m->grouped |= f->tensors[i].scale_scope == BN_SCALE_GROUP;
    m->embedding = bn_file_tensor(f, NO_LAYER, BN_EMBEDDING);
    if (m->config.has_head && m->config.tie_embeddings) {
        m->head = m->embedding;
        m->head.bias = bn_file_tensor(f, NO_LAYER, BN_HEAD).bias;
    } else {
        m->head = bn_file_tensor(f, NO_LAYER, BN_HEAD);
    }
    m->final_norm = gain(f, NO_LAYER, BN_FINAL_NORM);
    m->rope_frequencies[0] = gain(f, NO_LAYER, BN_ROPE_FREQUENCIES);
    m->rope_frequencies[1] = gain(f, NO_LAYER, BN_ROPE_LOCAL_FREQUENCIES);
    return BN_OK;
}

static bn_status select_kernels(const char *asked, bn_kernels *kernels, char *detail) {
    const char *isa = asked ? asked : getenv("BITNET_ISA");
    if (bn_kernels_select(kernels, isa && *isa ? isa : NULL))
        return BN_OK;
    return bn_fail(detail, BN_ERR_ARGUMENT,
                   "%s '%.32s' is not one this machine runs; the best is '%s'",
                   asked ? "isa" : "the environment variable BITNET_ISA: isa", isa, bn_isa_name(0));
}

static bn_status start_threads(int32_t asked, bn_pool **pool, char *detail) {
    const int32_t threads = asked ? asked : bn_default_threads();
    const bn_status status = bn_pool_new(threads, pool);
    if (status == BN_ERR_THREAD)
        return bn_fail(detail, status, "the system does not give %d threads: ask for fewer",
                       (int)threads);
    return status;
}

/* Whether the compiler makes one operation of a product and a sum, which floats.h cannot see. */
static int contracts(void) {
    const volatile float a = 1 + 0x1p-12f, square = 1 + 0x1p-11f; /* rounded */
    return a * a - square != 0;
}

/* Everything after the bytes are there. Takes over the mapping, also on failure. */
static bn_status open_mapping(bn_mapping mapping, const bn_load_options *options, bn_model **model,
                              char *detail) {
    BN_STANDARD_FLOATS;
    const bn_load_options defaults = {0};
    const bn_load_options *o = options ? options : &defaults;
    bn_model *m = calloc(1, sizeof *m);
    bn_status status = BN_ERR_MEMORY;
    if (!m) {
        bn_mapping_close(&mapping);
        return status;
    }
    m->mapping = mapping;
    if (contracts()) {
        status = bn_fail(detail, BN_ERR_UNSUPPORTED,
                         "this library was compiled so that its results differ from those of "
                         "others; compile it with -ffp-contract=off");
        goto error;
    }
    if ((status = select_kernels(o->isa, &m->kernels, detail)))
        goto error;
    if ((status = bn_file_parse(mapping.bytes, mapping.size, &m->kernels, &m->file, detail)))
        goto error;
    if ((status = check_supported(&m->file, detail)))
        goto error;
    if ((status = start_threads(o->threads, &m->pool, detail)))
        goto error;
    if (!o->no_verify && (status = bn_file_verify(&m->file, &m->kernels, m->pool, detail)))
        goto error;
    if ((status = resolve(m)))
        goto error;
    *model = m;
    return BN_OK;
error:
    bn_model_close(m);
    return status;
}

/* `detail` begins empty, so that here one is found that nobody has written to. */
static void begin(char *detail) {
    if (detail)
        *detail = '\0';
}

static bn_status explain(bn_status status, char *detail) {
    return status && detail && !*detail ? bn_fail(detail, status, "%s", bn_status_text(status))
                                        : status;
}

static bn_status check_options(const bn_load_options *o, char *detail) {
    if (o && (o->threads < 0 || o->threads > 256))
        return bn_fail(detail, BN_ERR_ARGUMENT, "threads is %d, expected 0 (automatic) to 256",
                       (int)o->threads);
    return BN_OK;
}

bn_status bn_model_open(const char *path, const bn_load_options *options, bn_model **model,
                        char *detail) {
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

void bn_model_close(bn_model *m) {
    if (!m)
        return;
    bn_pool_free(m->pool);
    free(m->layers);
    bn_file_close(&m->file);
    bn_mapping_close(&m->mapping);
    free(m);
}

/* Adds what one matrix costs per token. */
static void count(bn_model_info *info, const bn_tensor *t) {
    uint64_t scales = 0;
    bn_tensor_scale_size(t->scale_scope, t->rows, t->cols, &scales);
    info->bytes_per_token += t->bytes + scales;
    if (t->encoding && t->encoding->ternary) {
        info->ternary_weights += (uint64_t)t->rows * t->cols;
        info->macs_per_token += (uint64_t)t->rows * t->cols;
    }
}

bn_status bn_model_get_info(const bn_model *m, bn_model_info *info) {
    if (!m || !info)
        return BN_ERR_ARGUMENT;
    const bn_config *c = &m->config;
    *info = (bn_model_info){.vocab_size = c->vocab_size,
                            .dim = c->dim,
                            .n_layers = c->n_layers,
                            .n_heads = c->n_heads,
                            .n_kv_heads = c->n_kv_heads,
                            .head_dim = c->head_dim,
                            .ffn_dim = c->ffn_dim,
                            .max_context = c->max_context,
                            .has_head = c->has_head,
                            .pooling = c->pooling,
                            .file_bytes = m->mapping.size,
                            .threads = bn_pool_running(m->pool),
                            .isa = m->kernels.isa};
    for (int32_t type = BN_KV_F16; type <= BN_KV_INT8; type++)
        info->kv_bytes_per_token[type] =
            (uint64_t)c->n_layers * c->n_kv_heads * 2 *
            (bn_cache_bytes(c, type, 1) + bn_cache_scale_bytes(type, 1));
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const bn_layer *l = &m->layers[i];
        const bn_tensor *matrices[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (size_t j = 0; j < sizeof matrices / sizeof *matrices; j++)
            count(info, matrices[j]);
    }
    count(info, &m->head);
    if (bn_head_screens(m))
        info->bytes_per_token -= bn_sketch_at(m->head.rows, m->head.cols).tiles; /* its codes */
    return BN_OK;
}

bn_status bn_model_get_section(const bn_model *m, bn_section which, const uint8_t **bytes,
                               size_t *size) {
    if (!m || !bytes || !size || which < BN_SECTION_METADATA || which > BN_SECTION_TEMPLATE)
        return BN_ERR_ARGUMENT;
    *bytes = m->file.section[which];
    *size = m->file.section_size[which];
    return BN_OK;
}
