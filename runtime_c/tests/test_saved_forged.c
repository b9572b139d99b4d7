/* SPDX-License-Identifier: MIT
 *
 * test_saved_forged.c: bytes that are not a saved session are refused with the right status, or
 * harmless.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */

#include "mask_model.h"

static uint8_t *saved(const bn_session *s, const void *note, uint64_t note_size, uint64_t *size) {
    *size = bn_session_saved_size(s, note_size);
    uint8_t *bytes = malloc((size_t)*size);
    CHECK(bytes != NULL);
    ok(bn_session_save(s, note, note_size, bytes, *size));
    return bytes;
}

/* Where the numbers of the record are. */
enum {
    CRC = 12,
    NOTE = 24,
    MODEL = 32,
    N_CTX = 48,
    BATCH = 56,
    POSITION = 60,
    WRITTEN = 64,
    PREFIX = 68,
    READY = 72,
    DRAFTED = 76,
    PENDING = 104,
    ZERO = 108,
    RECORD = 112
};

static void set_crc(uint8_t *bytes, uint64_t size) {
    bn_kernels scalar;
    bn_kernels_scalar(&scalar);
    const uint32_t crc = scalar.bytes.crc32(0, bytes + 16, (size_t)size - 16);
    memcpy(bytes + CRC, &crc, sizeof crc);
}

/* Load bytes from memory of exactly their size. */
static bn_status load(const uint8_t *bytes, uint64_t size) {
    uint8_t *copy = malloc(size ? (size_t)size : 1);
    char why[BN_DETAIL_SIZE];
    bn_session *s = NULL;
    CHECK(copy != NULL);
    memcpy(copy, bytes, (size_t)size);
    const bn_status status = bn_session_load(model, copy, size, &s, NULL, NULL, why);
    CHECK((status == BN_OK) == (s != NULL) && (status == BN_OK) == (why[0] == '\0'));
    free(copy);
    if (s && bn_session_position(s) < bn_session_context(s)) {
        const int32_t token = 3; /* any key values: logits, or none */
        const bn_status next = bn_session_append(s, &token, 1, BN_LOGITS_LAST, NULL);
        CHECK(next == BN_OK || next == BN_ERR_NUMERIC || (kind.headless && next == BN_ERR_NO_HEAD));
        if (!next)
            (void)bn_session_logits(s);
    }
    bn_session_free(s);
    return status;
}

static void test_damage(void) {
    bn_session *s = session(40, 0, BN_KV_F16);
    uint64_t size;
    ok(bn_session_append(s, text, 20, BN_LOGITS_LAST, NULL));
    uint8_t *bytes = saved(s, NULL, 0, &size);
    for (uint64_t cut = 0; cut < size; cut += cut < 200 ? 1 : 97)
        CHECK_EQ(load(bytes, cut), BN_ERR_TRUNCATED);
    for (uint64_t i = 0; i < size; i += i < 300 ? 1 : 61)
        for (int bit = 0; bit < 8; bit += i < 300 ? 1 : 7) {
            bytes[i] ^= (uint8_t)(1 << bit);
            const bn_status status = load(bytes, size);
            const bn_status expected = i < 8                       ? BN_ERR_MAGIC
                                       : i < 12                    ? BN_ERR_VERSION
                                       : i < 16 || i >= 24         ? BN_ERR_CHECKSUM
                                       : status == BN_ERR_TRAILING ? BN_ERR_TRAILING
                                                                   : BN_ERR_TRUNCATED;
            CHECK_EQ(status, expected);
            bytes[i] ^= (uint8_t)(1 << bit);
        }
    CHECK_EQ(load(bytes, size), BN_OK);
    bn_session_free(s);
    free(bytes);
}

/* Forged numbers in the record with a valid checksum: none causes access out of bounds. */
static void test_forged(void) {
    static const uint32_t values[] = {0, 1, 2, 19, 21, 39, 41, 0x7fffffff, 0x80000000, 0xffffffff};
    bn_session *s = session(40, 0, BN_KV_F16);
    uint64_t size, random = 5;
    ok(bn_session_append(s, text, 20, BN_LOGITS_LAST, NULL));
    uint8_t *bytes = saved(s, "a note", 7, &size), *forged = malloc((size_t)size);
    CHECK(forged != NULL);
    for (size_t at = 16; at < RECORD + 12; at += 4)
        for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
            memcpy(forged, bytes, (size_t)size);
            memcpy(forged + at, &values[i], sizeof values[i]);
            set_crc(forged, size);
            const bn_status status = load(forged, size);
            if (memcmp(forged, bytes, (size_t)size) == 0)
                CHECK_EQ(status, BN_OK);
            else if (at < N_CTX)
                CHECK_EQ(status, at < NOTE ? (status == BN_ERR_TRAILING ? status : BN_ERR_TRUNCATED)
                                 : at < MODEL ? BN_ERR_CONFIG
                                              : BN_ERR_MODEL);
        }
    for (int i = 0; i < 3000; i++) { /* then in keys, values and the state */
        memcpy(forged, bytes, (size_t)size);
        for (int n = 0; n < 40; n++)
            forged[RECORD + check_below(&random, (size_t)size - RECORD)] =
                (uint8_t)check_below(&random, 256);
        set_crc(forged, size);
        const bn_status status = load(forged, size);
        CHECK(status == BN_OK || status == BN_ERR_TOKEN);
    }
    bn_session_free(s);
    free(forged);
    free(bytes);
}

/* Codes and scales that no session has are refused: tiers would not compute the same from them. */
static void test_codes(int32_t type) {
    enum { TOKENS = 20 };
    static const struct {
        uint32_t at, word; /* 0: key, 1: value, 2: the scale of the value */
        bn_status status;  /* of the type int8 */
    } forgeries[] = {{0, 0x01810181, BN_OK},        {0, 0x80010101, BN_ERR_CODE},
                     {1, 0x7f81ff00, BN_OK},        {1, 0x01018001, BN_ERR_CODE},
                     {2, 0x00000000, BN_OK},        {2, 0xffc00000, BN_OK /* NaN */},
                     {2, 0x80000000, BN_ERR_SCALE}, {2, 0xbf800000, BN_ERR_SCALE},
                     {2, 0xff800000, BN_ERR_SCALE}};
    bn_session *s = session(40, 0, type);
    ok(bn_session_append(s, text, TOKENS, BN_LOGITS_LAST, NULL));
    uint64_t size;
    uint8_t *bytes = saved(s, NULL, 0, &size);
    const bn_cache_part *part = &s->cache.parts[0];
    const size_t last = size - part->row / part->heads; /* the last head of the last position */
    const size_t at[] = {last, last + part->key, last + part->key + part->value};
    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        uint8_t *forged = tiny_copy(bytes, (size_t)size);
        tiny_put(forged + at[forgeries[i].at], forgeries[i].word, 4);
        set_crc(forged, size);
        const int any = type == BN_KV_K4V8 && forgeries[i].at == 0; /* all nibbles are valid */
        CHECK_EQ(load(forged, size), any ? BN_OK : forgeries[i].status);
        free(forged);
    }
    bn_session_free(s);
    free(bytes);
}

/* Words of the record, which then has this many bytes more of a part and less of the note. */
typedef struct forgery {
    struct {
        uint32_t at, to;
    } words[4];
    int32_t more;
} forgery;

/* Numbers that no session has are refused, although the sizes agree with them. */
static void test_impossible(uint32_t draft, uint32_t headless) {
    enum { STATE = DIM * sizeof(float), LENGTH = 20, MOST = 40 };
    static uint8_t note[1 << 12];
    kind.draft = draft, kind.headless = headless;
    begin(BN_MASK_CAUSAL, 0, 0);
    bn_session *s = session(MOST, 0, BN_KV_F16);
    ok(bn_session_append(s, text, LENGTH, headless ? BN_LOGITS_NONE : BN_LOGITS_LAST, NULL));
    const int32_t all = LENGTH * (int32_t)(sizeof(int32_t) + s->cache.parts[0].row);
    const int32_t backlog = s->pending * (int32_t)STATE;
    const forgery forgeries[] = {
        {{{BATCH, MOST + 1}}, 0},
        {{{WRITTEN, LENGTH - 1}}, 0},
        {{{WRITTEN, MOST + 1}}, 0},
        {{{PREFIX, 1}}, 0},
        {{{READY, 2}}, headless ? STATE : 0},
        {{{READY, 1}, {POSITION, headless ? LENGTH : 0}, {WRITTEN, headless ? LENGTH : 0}},
         headless ? STATE : -all},
        {{{POSITION, 0}, {READY, 0}, {DRAFTED, 0}, {PENDING, 0}},
         -all - backlog - (headless ? 0 : STATE)},
        {{{DRAFTED, LENGTH + 1}, {PENDING, 0}}, -backlog},
        {{{DRAFTED, draft ? LENGTH - 1 : 0}, {PENDING, 2}}, 2 * STATE - backlog},
        {{{DRAFTED, (uint32_t)-1}, {PENDING, 1}}, STATE - backlog},
        {{{DRAFTED, 0}, {PENDING, BN_BACKLOG + 1}}, (BN_BACKLOG + 1) * STATE - backlog},
        {{{DRAFTED, draft ? LENGTH + 1 : LENGTH}, {PENDING, 0}}, -backlog},
        {{{POSITION, MOST}, {WRITTEN, MOST}}, all}, /* the note would have less than no bytes */
        {{{N_CTX, 0}, {POSITION, 0}, {WRITTEN, 0}, {READY, 0}},
         -all - (headless ? 0 : STATE)}, /* 0 is no default here */
        {{{ZERO, 1}}, 0},
    };
    uint64_t size;
    uint8_t *bytes = saved(s, note, sizeof note, &size), *forged = malloc((size_t)size);
    CHECK(forged != NULL);
    CHECK_EQ(load(bytes, size), BN_OK);
    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        const forgery *f = &forgeries[i];
        memcpy(forged, bytes, (size_t)size);
        for (int word = 0; word < 4 && f->words[word].at; word++)
            tiny_put(forged + f->words[word].at, f->words[word].to, 4);
        tiny_put(forged + NOTE, (uint64_t)((int64_t)sizeof note - f->more), 8);
        set_crc(forged, size);
        CHECK_MSG(load(forged, size) == BN_ERR_CONFIG, "forgery %zu", i);
    }
    memcpy(forged, bytes, (size_t)size);
    tiny_put(forged + RECORD + sizeof note, VOCAB, 4);
    set_crc(forged, size);
    CHECK_EQ(load(forged, size), BN_ERR_TOKEN);
    bn_session_free(s);
    CHECK_EQ(bn_model_cache_bytes(model), 0); /* what was refused is gone, too */
    free(bytes);
    free(forged);
    end();
}

/* A position for which layers with a window have forgotten tokens that it needs. */
static void test_forgotten(void) {
    enum { FIRST = 53 /* 290 - 256 slots + 20 - 1 */ };
    begin(BN_MASK_CAUSAL, 20, 2);
    bn_session *s = session(300, 32, BN_KV_INT8);
    const uint32_t row = (uint32_t)s->cache.parts[1].row;
    ok(bn_session_append(s, text, 290, BN_LOGITS_LAST, NULL));
    CHECK_EQ(bn_session_rewind_least(s), FIRST);
    ok(bn_session_rewind(s, FIRST));
    uint64_t size;
    uint8_t *note = calloc(100, row), *bytes = saved(s, note, 100 * row, &size);
    CHECK_EQ(tiny_get(bytes + WRITTEN, 4), 290);
    CHECK_EQ(size, RECORD + 100 * row + FIRST * (4 + s->cache.parts[0].row) +
                       (FIRST - (290 - 256)) * row); /* no position that was overwritten */
    CHECK_EQ(load(bytes, size), BN_OK);
    memset(bytes + RECORD, 0, size - RECORD);     /* zeros are valid wherever a part begins */
    for (uint32_t more = 1; more <= 10; more++) { /* this many fewer rows are kept */
        tiny_put(bytes + WRITTEN, 290 + more, 4);
        tiny_put(bytes + NOTE, (100 + more) * row, 8);
        set_crc(bytes, size);
        CHECK_EQ(load(bytes, size), BN_ERR_CONFIG);
    }
    bn_session_free(s);
    free(bytes);
    free(note);
    end();
}

int main(void) {
    test_forgotten();
    test_impossible(0, 0);
    test_impossible(0, 1);
    test_impossible(1, 0);
    begin(BN_MASK_CAUSAL, 0, 0);
    test_damage();
    test_forged();
    test_codes(BN_KV_INT8);
    test_codes(BN_KV_K4V8);
    end();
    return 0;
}
