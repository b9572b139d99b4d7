/* SPDX-License-Identifier: MIT
 *
 * saved.c: saves a session as bytes, and loads it. Little-endian, no padding between the parts:
 *
 *     bytes 0     the record below, 112 bytes
 *     112         the note: whatever the program wants to keep
 *                 i32 tokens[position]
 *                 f32 hidden[dim], the output of the last layer, if ready is 1
 *                 f32 backlog[pending][dim], states that the draft has not taken (backlog.h)
 *                 for each part of the cache (layers that see all, layers with a window), each
 *                 position that it has, oldest first, and each layer and head: key with its
 *                 scales, value, f32 scale of the value if the type has one
 *
 * A part has the positions that it has not overwritten (first_kept). Logits are not saved: they are
 * computed from hidden. All numbers that could be invalid are checked here, also the codes and
 * scales of keys and values (kv.h): the tiers would not all compute the same from wrong ones.
 */
#include <inttypes.h>
#include <string.h>

#include "session.h"
#include "system/status.h"

typedef struct record {
    uint8_t magic[8];
    uint32_t version, crc; /* checksum of everything after these two */
    uint64_t size;         /* total size */
    uint64_t note_size;
    uint64_t model_size; /* of the packed file; its checksums follow */
    uint32_t model_header, model_data;
    int32_t n_ctx, kv_type, batch, position;
    uint32_t written, prefix; /* positions written; how many at the beginning see each other */
    int32_t ready;            /* 1: hidden is present */
    int32_t drafted;          /* draft rows in the cache; -1: the session never guesses */
    uint64_t seed;
    uint64_t adapter_size; /* of the adapter's file, its checksums follow; 0: no adapter */
    uint32_t adapter_header, adapter_data;
    int32_t pending; /* states that the draft has not taken */
    uint32_t zero;
} record;

enum { VERSION = 2, COVERED = 16 }; /* offset of the first byte that crc covers */
static const uint8_t magic[8] = {0x89, 'B', 'N', 'S', 'E', 'S', 'S', '\n'};
_Static_assert(sizeof(record) == 112, "bytes of a file");

/* The oldest position that a part still has. */
static size_t first_kept(const record *r, const bn_cache_part *part) {
    return r->written > part->slots ? r->written - part->slots : 0;
}

/* Bytes of a state, as hidden and the backlog have them. */
static size_t state_size(const bn_session *s) {
    return s->stack->config.dim * sizeof(float);
}

/* Total size; r is valid for the session, which has its context, type and batch. */
static uint64_t size_of(const bn_session *s, const record *r) {
    uint64_t size = sizeof *r + r->note_size + (uint64_t)r->position * sizeof(int32_t);
    size += ((uint64_t)r->ready + (uint64_t)r->pending) * state_size(s);
    for (size_t i = 0; i < BN_CACHE_PARTS; i++) {
        const uint64_t first = first_kept(r, &s->cache.parts[i]);
        if ((uint64_t)r->position > first)
            size += ((uint64_t)r->position - first) * s->cache.parts[i].row;
    }
    return size;
}

static record record_of(const bn_session *s, uint64_t note_size) {
    const bn_file *file = &s->model->file;
    record r = {.version = VERSION,
                .note_size = note_size,
                .model_size = file->size,
                .model_header = file->header_crc,
                .model_data = file->weights.data_crc,
                .n_ctx = s->n_ctx,
                .kv_type = s->cache.type,
                .batch = s->batch,
                .position = s->position,
                .written = (uint32_t)s->cache.written,
                .prefix = (uint32_t)s->cache.prefix,
                .ready = s->ready != BN_READY_NOTHING,
                .drafted = s->drafted,
                .pending = s->pending,
                .seed = s->seed};
    if (s->adapter) {
        const bn_file *adapter = &s->model->added[s->adapter - 1].file;
        r.adapter_size = adapter->size;
        r.adapter_header = adapter->header_crc;
        r.adapter_data = adapter->weights.data_crc;
    }
    memcpy(r.magic, magic, sizeof magic);
    r.size = size_of(s, &r);
    return r;
}

uint64_t bn_session_saved_size(const bn_session *s, uint64_t note_size) {
    return s && note_size < UINT64_MAX / 2 ? record_of(s, note_size).size : 0;
}

static uint8_t *put(uint8_t *to, const void *from, size_t n) {
    if (n > 0)
        memcpy(to, from, n);
    return to + n;
}

static const uint8_t *get(void *to, const uint8_t *from, size_t n) {
    memcpy(to, from, n);
    return from + n;
}

bn_status bn_session_save(const bn_session *s, const void *note, uint64_t note_size, void *bytes,
                          uint64_t size) {
    if (!s || !bytes || (!note && note_size > 0) || size < sizeof(record) ||
        size != bn_session_saved_size(s, note_size))
        return BN_ERR_ARGUMENT;
    record r = record_of(s, note_size);
    uint8_t *at = put((uint8_t *)bytes + sizeof r, note, (size_t)note_size);
    at = put(at, s->tokens, (size_t)s->position * sizeof *s->tokens);
    at = put(at, s->hidden, (size_t)r.ready * state_size(s));
    at = put(at, s->backlog, (size_t)r.pending * state_size(s));
    for (size_t i = 0; i < BN_CACHE_PARTS; i++) {
        const size_t row = s->cache.parts[i].row;
        for (size_t p = first_kept(&r, &s->cache.parts[i]); p < (size_t)s->position; p++) {
            bn_cache_read(&s->cache, i, p, at);
            at += row;
        }
    }
    memcpy(bytes, &r, sizeof r);
    r.crc = s->model->kernels.bytes.crc32(0, (uint8_t *)bytes + COVERED, (size_t)size - COVERED);
    memcpy(bytes, &r, sizeof r);
    return BN_OK;
}

/* Checks that need only the bytes and the model. */
static bn_status check_bytes(const bn_model *m, const uint8_t *bytes, uint64_t size, record *r,
                             char *detail) {
    if (size < sizeof *r)
        return bn_fail(detail, BN_ERR_TRUNCATED,
                       "there are %" PRIu64 " bytes, expected a saved session, %zu or more", size,
                       sizeof *r);
    memcpy(r, bytes, sizeof *r);
    if (memcmp(r->magic, magic, sizeof magic) != 0)
        return bn_fail(detail, BN_ERR_MAGIC,
                       "this is not a saved session: it does not begin with "
                       "89 42 4e 53 45 53 53 0a");
    if (r->version != VERSION)
        return bn_fail(detail, BN_ERR_VERSION, "version is %" PRIu32 ", expected %d", r->version,
                       VERSION);
    if (r->size != size)
        return bn_fail(detail, r->size > size ? BN_ERR_TRUNCATED : BN_ERR_TRAILING,
                       "there are %" PRIu64 " bytes, expected %" PRIu64, size, r->size);
    const uint32_t crc = m->kernels.bytes.crc32(0, bytes + COVERED, (size_t)size - COVERED);
    if (crc != r->crc)
        return bn_fail(detail, BN_ERR_CHECKSUM,
                       "the checksum is %08" PRIx32 ", expected %08" PRIx32, crc, r->crc);
    if (r->model_size != m->file.size || r->model_header != m->file.header_crc ||
        r->model_data != m->file.weights.data_crc)
        return bn_fail(detail, BN_ERR_MODEL,
                       "the session belongs to a model of %" PRIu64
                       " bytes with checksum %08" PRIx32 ", this one has %zu and %08" PRIx32,
                       r->model_size, r->model_header, m->file.size, m->file.header_crc);
    return BN_OK;
}

/* Find the session's adapter among those of the model: the first of equal ones. */
static bn_status find_adapter(const bn_model *m, const record *r, int32_t *adapter, char *detail) {
    *adapter = 0;
    if (r->adapter_size == 0 && r->adapter_header == 0 && r->adapter_data == 0)
        return BN_OK;
    while (*adapter < m->n_added) {
        const bn_file *f = &m->added[(*adapter)++].file;
        if (f->size == r->adapter_size && f->header_crc == r->adapter_header &&
            f->weights.data_crc == r->adapter_data)
            return BN_OK;
    }
    return bn_fail(detail, BN_ERR_MODEL,
                   "the session has an adapter of %" PRIu64 " bytes with checksum %08" PRIx32
                   ", which is not among the %" PRId32 " that the model was loaded with",
                   r->adapter_size, r->adapter_header, m->n_added);
}

/* Whether the numbers, although covered by the checksum, can be those of a session; s is the new
 * one. */
static bn_status check_numbers(const bn_session *s, const record *r, char *detail) {
    const bn_config *c = &s->stack->config;
    const uint32_t position = (uint32_t)r->position;
    const int together = c->mask != BN_MASK_CAUSAL;
    const int valid = r->position >= 0 && r->position <= r->n_ctx && r->written >= position &&
                      r->written <= (uint32_t)r->n_ctx && (position > 0 || r->written == 0) &&
                      r->prefix <= (together ? position : 0) && (r->ready == 0 || r->ready == 1) &&
                      !(r->ready && (position == 0 || !c->has_head)) && r->batch == s->batch &&
                      r->zero == 0;
    const int32_t most = s->stack->draft ? r->position : 0;
    const int follows = r->drafted >= -1 && r->drafted <= most && r->pending >= 0 &&
                        r->pending <= BN_BACKLOG &&
                        r->pending <= (r->drafted < 0 ? 0 : most - r->drafted);
    if (valid && !follows)
        return bn_fail(detail, BN_ERR_CONFIG,
                       "a draft with %" PRId32 " rows and %" PRId32 " states of %" PRId32
                       " tokens cannot be that of a session",
                       r->drafted, r->pending, r->position);
    if (!valid)
        return bn_fail(detail, BN_ERR_CONFIG,
                       "position %" PRId32 " of %" PRId32 ", written %" PRIu32 ", prefix %" PRIu32
                       ", ready %" PRId32 ", batch %" PRId32 " cannot be those of a session",
                       r->position, r->n_ctx, r->written, r->prefix, r->ready, r->batch);
    if (r->note_size > r->size || size_of(s, r) != r->size)
        return bn_fail(detail, BN_ERR_CONFIG,
                       "%" PRId32 " tokens and a note of %" PRIu64 " bytes do not make %" PRIu64,
                       r->position, r->note_size, r->size);
    return BN_OK;
}

static bn_status take_cache(bn_session *s, const record *r, const uint8_t *at, char *detail) {
    for (size_t i = 0; i < BN_CACHE_PARTS; i++) {
        const size_t row = s->cache.parts[i].row;
        for (size_t p = first_kept(r, &s->cache.parts[i]); p < (size_t)s->position; p++) {
            const bn_status status = bn_cache_check(&s->cache, i, at, s->stack->config.head_dim);
            if (status)
                return bn_fail(detail, status, "position %zu: %s", p,
                               status == BN_ERR_CODE
                                   ? "a code of a key or a value is -128, expected -127 to 127"
                                   : "the scale of a value is negative");
            bn_cache_write(&s->cache, i, p, at);
            at += row;
        }
    }
    return BN_OK;
}

static bn_status take(bn_session *s, const record *r, const uint8_t *at, char *detail) {
    const uint32_t V = s->stack->config.vocab_size;
    s->cache.written = r->written;
    s->cache.prefix = r->prefix;
    const size_t least = bn_cache_least(&s->cache, &s->stack->config);
    if ((size_t)r->position < least)
        return bn_fail(
            detail, BN_ERR_CONFIG,
            "position %" PRId32 " of %" PRIu32
            " that were written, expected %zu or more: layers with a window have forgotten",
            r->position, r->written, least);
    const bn_status status = bn_cache_prepare(&s->cache, 0, (size_t)r->position);
    if (status)
        return bn_fail(detail, status, "%s", bn_status_text(status));
    at = get(s->tokens, at, (size_t)r->position * sizeof *s->tokens);
    for (int32_t i = 0; i < r->position; i++)
        if (s->tokens[i] != BN_NO_TOKEN && (s->tokens[i] < 0 || (uint32_t)s->tokens[i] >= V))
            return bn_fail(detail, BN_ERR_TOKEN,
                           "token %" PRId32 " is %" PRId32 ", expected less than %" PRIu32, i,
                           s->tokens[i], V);
    s->position = r->position;
    s->seed = r->seed;
    s->ready = r->ready ? BN_READY_HIDDEN : BN_READY_NOTHING;
    s->drafted = r->drafted;
    s->pending = r->pending;
    at = get(s->hidden, at, (size_t)r->ready * state_size(s));
    at = get(s->backlog, at, (size_t)r->pending * state_size(s));
    return take_cache(s, r, at, detail);
}

bn_status bn_session_load(bn_model *model, const void *bytes, uint64_t size, bn_session **session,
                          const uint8_t **note, uint64_t *note_size, char *detail) {
    record r;
    bn_session *s;
    if (detail)
        detail[0] = '\0';
    if (!model || !bytes || !session)
        return bn_fail(detail, BN_ERR_ARGUMENT, "a pointer is null");
    bn_status status = check_bytes(model, bytes, size, &r, detail);
    if (status)
        return status;
    bn_session_options options = {.n_ctx = r.n_ctx, .kv_type = r.kv_type, .batch = r.batch};
    if ((status = find_adapter(model, &r, &options.adapter, detail)))
        return status;
    status = r.n_ctx < 1 || r.batch < 1 ? BN_ERR_ARGUMENT : bn_session_new(model, &options, &s);
    if (status)
        return bn_fail(detail, status == BN_ERR_ARGUMENT ? BN_ERR_CONFIG : status,
                       "n_ctx %" PRId32 ", kv_type %" PRId32 ", batch %" PRId32 ": %s", r.n_ctx,
                       r.kv_type, r.batch, bn_status_text(status));
    status = check_numbers(s, &r, detail);
    const uint8_t *at = (const uint8_t *)bytes + sizeof r;
    if (!status)
        status = take(s, &r, at + r.note_size, detail);
    if (status) {
        bn_session_free(s);
        return status;
    }
    if (note && note_size) {
        *note = at;
        *note_size = r.note_size;
    }
    *session = s;
    return BN_OK;
}
