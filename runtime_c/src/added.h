/* SPDX-License-Identifier: MIT
 *
 * added.h: the adapters of a model: its own, stored in its file, and additional ones, each in a
 * separate file, of which a text uses one or none.
 */
#ifndef BITNET_ADDED_H
#define BITNET_ADDED_H

#include "file/file.h"
#include "linear/adapter.h"

/* An adapter from a separate file. */
typedef struct bn_added {
    bn_mapping mapping;
    bn_file file;
    bn_adapter adapter;
} bn_added;

/* Read the adapter that a file has for a stack; {0} if it has none. Fails with BN_ERR_MEMORY. */
bn_status bn_adapter_read(const bn_file *file, uint32_t stack, bn_adapter *adapter);

/* Open the adapter files of options->adapters into an array of n, to be closed by bn_added_close.
 * Fails like bn_file_parse and bn_file_verify, which `no_verify` skips, and with BN_ERR_MODEL if an
 * adapter belongs to another model. */
bn_status bn_added_open(const bn_file *model, const bn_load_options *options,
                        const bn_kernels *kernels, bn_pool *pool, bn_added **added, int32_t *n,
                        char *detail);
void bn_added_close(bn_added *added, int32_t n);

#endif
