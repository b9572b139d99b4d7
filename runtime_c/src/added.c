/* SPDX-License-Identifier: MIT
 *
 * added.c: see added.h.
 */
#include "added.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bn_status bn_adapter_read(const bn_file *file, uint32_t stack, bn_adapter *adapter) {
    const bn_config *c = &file->stacks[stack];
    *adapter = (bn_adapter){.rank = c->adapters & BN_ADAPTER_RANK};
    if (adapter->rank == 0)
        return BN_OK;
    adapter->linears = calloc((size_t)bn_file_linears(c) + 1, sizeof *adapter->linears);
    if (!adapter->linears)
        return BN_ERR_MEMORY;
    bn_file_low_rank(file, stack, adapter->linears);
    return BN_OK;
}

/* Whether the stacks are equal apart from their adapters. */
static int same_stacks(const bn_file *a, const bn_file *b) {
    if (a->n_stacks != b->n_stacks)
        return 0;
    for (size_t i = 0; i < a->n_stacks; i++) {
        bn_config of_a = a->stacks[i], of_b = b->stacks[i];
        of_a.adapters = of_b.adapters = 0;
        if (memcmp(&of_a, &of_b, sizeof of_a) != 0)
            return 0;
    }
    return 1;
}

/* Checked first, so that the numbers of a hostile file are used only if they equal the model's. */
static bn_status check_base(const bn_file *model, const bn_file *file, char *detail) {
    const bn_weights *of = &file->base, *is = &model->weights;
    if (!file->adapter_alone)
        return bn_fail(detail, BN_ERR_MODEL, "it is a model, expected an adapter");
    if (memcmp(of, is, sizeof *of) != 0 || !same_stacks(model, file))
        return bn_fail(detail, BN_ERR_MODEL,
                       "it belongs to a model with %" PRIu64 " bytes of weights and checksum "
                       "%08" PRIx32 ", this one has %" PRIu64 " and %08" PRIx32,
                       of->data_size, of->data_crc, is->data_size, is->data_crc);
    return BN_OK;
}

/* Only the first stack, that of text, can have adapters. */
static bn_status read(const bn_file *file, bn_adapter *adapter, char *detail) {
    for (uint32_t i = 0; i < file->n_stacks; i++)
        if (file->stacks[i].adapters && (i > 0 || file->stacks[i].input == BN_INPUT_IMAGES))
            return bn_fail(detail, BN_ERR_UNSUPPORTED,
                           "it has adapters of images or drafts, which this engine cannot run");
    return bn_adapter_read(file, 0, adapter);
}

static bn_status open_one(const bn_file *model, const char *path, const bn_load_options *options,
                          const bn_kernels *kernels, bn_pool *pool, bn_added *a, char *detail) {
    bn_status status = bn_mapping_open(path, options->no_mmap, &a->mapping, detail);
    if (!status)
        status = bn_file_parse(a->mapping.bytes, a->mapping.size, kernels, &a->file, detail);
    if (!status)
        status = check_base(model, &a->file, detail);
    if (!status && !options->no_verify)
        status = bn_file_verify(&a->file, kernels, pool, detail);
    return status ? status : read(&a->file, &a->adapter, detail);
}

/* Prefix a failure with the number of the adapter. */
static bn_status name(bn_status status, int32_t number, char *detail) {
    char why[BN_DETAIL_SIZE];
    if (!status || !detail)
        return status;
    snprintf(why, sizeof why, "%s", *detail ? detail : bn_status_text(status));
    return bn_fail(detail, status, "adapter %" PRId32 ": %.230s", number, why);
}

bn_status bn_added_open(const bn_file *model, const bn_load_options *options,
                        const bn_kernels *kernels, bn_pool *pool, bn_added **added, int32_t *n,
                        char *detail) {
    bn_status status = BN_OK;
    if (options->n_adapters == 0)
        return BN_OK;
    *added = calloc((size_t)options->n_adapters, sizeof **added);
    if (!*added)
        return BN_ERR_MEMORY;
    for (*n = 0; *n < options->n_adapters && !status; ++*n) {
        bn_added *one = *added + *n;
        status = open_one(model, options->adapters[*n], options, kernels, pool, one, detail);
        status = name(status, *n + 1, detail);
    }
    return status;
}

void bn_added_close(bn_added *added, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        free(added[i].adapter.linears);
        bn_file_close(&added[i].file);
        bn_mapping_close(&added[i].mapping);
    }
    free(added);
}
