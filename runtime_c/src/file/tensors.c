/* SPDX-License-Identifier: MIT
 *
 * tensors.c: checks the tensor table of a packed file against exactly what its stacks require
 * (export/FORMAT.md §3).
 */
#include "calls.h"

#include <inttypes.h>

_Static_assert(sizeof(bn_record) == 64, "a tensor record has 64 bytes");

static int allowed(const bn_encoding *e, bn_form form, uint32_t role, uint32_t cols,
                   uint32_t scope) {
    return (e->forms >> form & 1) && scope <= BN_SCALE_GROUP && (e->scopes >> scope & 1) &&
           (!e->only_role || role == e->only_role) && (!e->most_cols || cols <= e->most_cols);
}

/* --- the table --- */

/* State of the walk: the next record, and the first unclaimed byte of DATA. */
typedef struct bn_walk {
    const bn_file *file;
    size_t index;
    uint64_t end;
    char *detail;
} bn_walk;

/* Claim `size` bytes of DATA at the next multiple of BN_ALIGN. */
static int claim(bn_walk *w, uint64_t size, uint64_t *offset) {
    *offset = bn_align(w->end);
    return !__builtin_add_overflow(*offset, size, &w->end) && w->end <= w->file->data_size;
}

static int same_key(const bn_record *a, const bn_record *b) {
    return a->stack == b->stack && a->layer == b->layer && a->role == b->role &&
           a->expert == b->expert && a->part == b->part;
}

/* The next record must be `want` (its key, rows and cols), and its data must follow in DATA. */
static bn_status take(bn_walk *w, bn_record want, bn_form form) {
    char name[BN_NAME_SIZE], other[BN_NAME_SIZE];
    bn_record_name(&want, name);
    if (w->index >= w->file->n_tensors)
        return bn_fail(w->detail, BN_ERR_TENSOR, "%s is missing, the table ends after %zu tensors",
                       name, w->index);
    const bn_record found = w->file->tensors[w->index];
    if (!same_key(&found, &want)) {
        bn_record_name(&found, other);
        return bn_fail(w->detail, BN_ERR_TENSOR, "tensor %zu is %s, expected %s", w->index, other,
                       name);
    }
    const bn_encoding *encoding = bn_encoding_of(found.encoding);
    if (!encoding || !allowed(encoding, form, want.role, want.cols, found.scale_scope))
        return bn_fail(w->detail, BN_ERR_TENSOR,
                       "%s: encoding %u with scale scope %u is not allowed here (%s)", name,
                       found.encoding, found.scale_scope,
                       encoding ? encoding->name : "no encoding has this number");
    if (!bn_tensor_data_size(found.encoding, want.rows, want.cols, &want.size) ||
        !bn_tensor_scale_size(found.scale_scope, want.rows, want.cols, &want.scale_size) ||
        !claim(w, want.size, &want.offset) ||
        (want.scale_size > 0 && !claim(w, want.scale_size, &want.scale_offset)))
        return bn_fail(w->detail, BN_ERR_TENSOR,
                       "%s: a %" PRIu32 " x %" PRIu32 " tensor ends past DATA, which has %zu bytes",
                       name, want.rows, want.cols, w->file->data_size);
    const struct {
        const char *field;
        uint64_t found, expected;
    } fields[] = {
        {"rows", found.rows, want.rows},
        {"cols", found.cols, want.cols},
        {"offset", found.offset, want.offset},
        {"size", found.size, want.size},
        {"scale_offset", found.scale_offset, want.scale_offset},
        {"scale_size", found.scale_size, want.scale_size},
        {"a reserved field", found.reserved8 | found.reserved32 | found.reserved64, 0},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].found != fields[i].expected)
            return bn_fail(w->detail, BN_ERR_TENSOR, "%s: %s is %" PRIu64 ", expected %" PRIu64,
                           name, fields[i].field, fields[i].found, fields[i].expected);
    w->index++;
    return BN_OK;
}

/* One part of one tensor of a role. */
static bn_status take_part(bn_walk *w, bn_record want, uint8_t part, uint32_t rows, uint32_t cols,
                           bn_form form) {
    want.part = part;
    want.rows = rows;
    want.cols = cols;
    return take(w, want, form);
}

/* All parts of one tensor of a role. */
static bn_status take_parts(bn_walk *w, const bn_call *call, bn_record want) {
    const uint32_t outputs = call->form == BN_VECTOR ? call->cols : call->rows;
    bn_status status = BN_OK;
    const int alone = w->file->adapter_alone;
    if (call->weight && !alone)
        status = take_part(w, want, BN_WEIGHT, call->rows, call->cols, call->form);
    if (call->bias && !alone && !status)
        status = take_part(w, want, BN_BIAS, 1, outputs, BN_VECTOR);
    if (call->rank > 0 && !status)
        status = take_part(w, want, BN_ADAPTER_IN, call->rank, call->cols, BN_LOW_RANK);
    if (call->rank > 0 && !status)
        status = take_part(w, want, BN_ADAPTER_OUT, call->rank, call->rows, BN_LOW_RANK);
    return status;
}

/* All experts of one role. Stops at the first difference, so that the work is proportional to the
 * table and not to the numbers in a hostile configuration. */
static bn_status take_role(bn_walk *w, const bn_call *call, bn_record want) {
    const uint32_t count = call->experts > 0 ? call->experts : 1;
    bn_status status = BN_OK;
    for (uint32_t e = 0; e < count && !status; e++) {
        want.expert = call->experts > 0 ? (uint16_t)e : (uint16_t)BN_NO_EXPERT;
        status = take_parts(w, call, want);
    }
    return status;
}

static bn_status take_stack(bn_walk *w, uint32_t stack) {
    const bn_config config = w->file->stacks[stack];
    bn_status status = BN_OK;
    for (uint32_t layer = 0; layer <= config.n_layers && status == BN_OK; layer++) {
        const int last = layer == config.n_layers; /* tensors outside the layers */
        const bn_record want = {.stack = (uint16_t)stack,
                                .layer = last ? (uint16_t)BN_NO_LAYER : (uint16_t)layer};
        const uint32_t first_role = last ? BN_EMBEDDING : 1;
        const uint32_t end_role = last ? BN_STACK_ROLES : BN_EMBEDDING;
        for (uint32_t role = first_role; role < end_role && status == BN_OK; role++) {
            const bn_call call = bn_call_for(&config, role);
            bn_record record = want;
            record.role = (uint16_t)role;
            if (call.rank > 0 || (!w->file->adapter_alone && (call.weight || call.bias)))
                status = take_role(w, &call, record);
        }
    }
    return status;
}

bn_status bn_check_tensors(const bn_file *file, char *detail) {
    bn_walk walk = {.file = file, .detail = detail};
    for (uint32_t stack = 0; stack < file->n_stacks; stack++) {
        const bn_status status = take_stack(&walk, stack);
        if (status != BN_OK)
            return status;
    }
    if (walk.index != file->n_tensors) {
        const bn_record extra = file->tensors[walk.index];
        char name[BN_NAME_SIZE];
        bn_record_name(&extra, name);
        return bn_fail(detail, BN_ERR_TENSOR, "tensor %zu is %s, expected the end of the table",
                       walk.index, name);
    }
    if (walk.end != file->data_size)
        return bn_fail(detail, BN_ERR_TENSOR,
                       "the last tensor ends at %" PRIu64 ", expected at the end of DATA = %zu",
                       walk.end, file->data_size);
    return BN_OK;
}

/* --- looking up --- */

/* Sort key of a record in the table. */
static uint64_t order(const bn_record *r) {
    return (uint64_t)r->stack << 56 | (uint64_t)r->layer << 40 | (uint64_t)r->role << 24 |
           (uint64_t)r->expert << 8 | r->part;
}

/* Returns 1 and fills *record if the table has this key. */
static int find(const bn_file *file, const bn_record *key, bn_record *record) {
    size_t low = 0, high = file->n_tensors;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        *record = file->tensors[middle];
        if (same_key(record, key))
            return 1;
        if (order(record) < order(key))
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

/* Linears of a layer: four of attention, and three places in each network. */
static uint32_t linears_of_layer(const bn_config *c) {
    return 4 + 3 * (c->n_experts > 0 ? c->n_experts : 1);
}

/* Number of a linear of a layer, in the order of roles; 0 for other tensors. */
static uint32_t number_of(const bn_config *c, const bn_record *key) {
    const uint32_t place = bn_linear_place(key->role);
    const uint32_t expert = key->expert == BN_NO_EXPERT ? 0 : key->expert;
    return place ? key->layer * linears_of_layer(c) + 3 * expert + place : 0;
}

uint32_t bn_file_linears(const bn_config *c) {
    return c->n_layers * linears_of_layer(c);
}

void bn_file_low_rank(const bn_file *file, uint32_t stack, bn_low_rank *linears) {
    for (size_t i = 0; i < file->n_tensors; i++) {
        const bn_record *r = &file->tensors[i];
        const void *codes = file->data + r->offset, *scales = file->data + r->scale_offset;
        if (r->stack != stack || r->part < BN_ADAPTER_IN)
            continue;
        bn_low_rank *linear = &linears[number_of(&file->stacks[stack], r)];
        *(r->part == BN_ADAPTER_IN ? &linear->in : &linear->out) = codes;
        *(r->part == BN_ADAPTER_IN ? &linear->in_scales : &linear->out_scales) = scales;
    }
}

bn_tensor bn_file_tensor(const bn_file *file, uint32_t stack, uint32_t layer, uint32_t role,
                         uint32_t expert) {
    bn_record key = {.stack = (uint16_t)stack,
                     .layer = (uint16_t)layer,
                     .role = (uint16_t)role,
                     .expert = (uint16_t)expert};
    bn_record r;
    bn_tensor tensor = {0};
    if (find(file, &key, &r)) {
        tensor = (bn_tensor){.data = file->data + r.offset,
                             .bytes = r.size,
                             .rows = r.rows,
                             .cols = r.cols,
                             .encoding = bn_encoding_of(r.encoding),
                             .scale_scope = r.scale_scope,
                             .number = number_of(&file->stacks[stack], &key)};
        const void *scales = file->data + r.scale_offset;
        if (r.scale_scope == BN_SCALE_GROUP)
            tensor.group_scales = scales;
        else if (r.scale_scope != BN_SCALE_NONE)
            tensor.scales = scales;
    }
    key.part = BN_BIAS;
    if (find(file, &key, &r))
        tensor.bias = (const float *)(const void *)(file->data + r.offset);
    key.part = BN_WEIGHT;
    key.role = (uint16_t)(BN_LINEAR_NORM + role);
    if (layer != BN_NO_LAYER && find(file, &key, &r))
        tensor.norm = (const float *)(const void *)(file->data + r.offset);
    key.part = BN_BIAS;
    if (tensor.norm && find(file, &key, &r))
        tensor.norm_bias = (const float *)(const void *)(file->data + r.offset);
    return tensor;
}

const float *bn_file_vector(const bn_file *file, uint32_t stack, uint32_t role) {
    const void *data = bn_file_tensor(file, stack, BN_NO_LAYER, role, BN_NO_EXPERT).data;
    return data;
}
