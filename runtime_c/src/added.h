/* SPDX-License-Identifier: MIT
 *
 * added.h: adapters that a model has: its own, which is in its file, and others, each a file of its
 * own, of which a text has one or none.
 */
#ifndef BITNET_ADDED_H
#define BITNET_ADDED_H

#include "file/file.h"
#include "linear/adapter.h"

/* One of the others. */
typedef struct bn_added {
    bn_mapping mapping;
    bn_file file;
    bn_adapter adapter;
} bn_added;

/* What a file has of adapters for a stack; {0} where it has none. Fails with BN_ERR_MEMORY. */
bn_status bn_adapter_read(const bn_file *file, uint32_t stack, bn_adapter *adapter);

/* Open the n adapters of a model's file, into an array that is to be closed. Fails like
 * bn_file_parse and bn_file_verify, which is left out if `no_verify`; and with BN_ERR_MODEL when
 * one belongs to another model. */
bn_status bn_added_open(const bn_file *model, const bn_load_options *options,
                        const bn_kernels *kernels, bn_pool *pool, bn_added **added, int32_t *n,
                        char *detail);
void bn_added_close(bn_added *added, int32_t n);

#endif
