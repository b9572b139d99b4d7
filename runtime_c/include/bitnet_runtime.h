/* SPDX-License-Identifier: MIT
 *
 * bitnet_runtime.h: run a packed BitNet b1.58 model on a CPU.
 *
 * The whole public C API. A program that continues a text:
 *
 *     char why[BN_DETAIL_SIZE];
 *     bn_model *model = NULL;
 *     bn_session *session = NULL;
 *     int32_t token;
 *     bn_status status = bn_model_open("model.bitnet", NULL, &model, why);
 *     if (!status)
 *         status = bn_session_new(model, NULL, &session);
 *     if (!status)
 *         status = bn_session_append(session, prompt, n_prompt, BN_LOGITS_LAST, NULL);
 *     while (!status && !(status = bn_session_sample(session, NULL, &token)) && token != eos)
 *         status = bn_session_append(session, &token, 1, BN_LOGITS_LAST, NULL);
 *     bn_session_free(session);
 *     bn_model_close(model);
 *
 * It ends with BN_OK when eos comes, with BN_ERR_CONTEXT when the context is full, and with
 * another status when something fails. runtime_c/examples has whole programs.
 *
 * Determinism. The logits of a token depend on the model file, the adapter, the KV cache
 * type and the tokens before it. They do not depend on the instruction set,
 * the number of threads, on how a text was cut into append calls, or on the
 * floating-point environment (rounding, flush-to-zero) of the calling thread,
 * which is put aside and given back: the bits are the same.
 *
 * Errors. Every function that can fail returns a bn_status; 0 is success. The
 * library never prints, exits, aborts or keeps a last error. On failure, out
 * parameters are left as they were, except where a comment says otherwise.
 *
 * Threads. A bn_model is immutable and may be shared; a bn_session belongs to one
 * caller at a time. Calls on sessions of one model take turns on the model's
 * thread pool, in the order in which they ask; a turn is a token, a draft, a few images, or a
 * block of a prompt (bn_session_options.batch), so that who generates never waits
 * for all of another's long prompt; but a prefix, or a bidirectional text, is one. Planning and
 * making a session wait for a turn, too, and so does freeing the last one of a model; freeing
 * another does not. bn_session_cancel and bn_stop_now
 * alone may be called at any moment, also from a signal handler. After fork() the child may go on
 * with models and sessions that were at rest; it computes with one thread, as a process has only
 * the forking thread of its parent's. To have more it opens the model again.
 */
#ifndef BITNET_RUNTIME_H
#define BITNET_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define BN_API
#else
#define BN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* cffi-begin: from here to cffi-end plain C only, read by build_cffi.py */

#define BN_DETAIL_SIZE 256 /* bytes of the buffer that receives an explanation */

/* One value for each way to fail. bn_status_text() has the sentence for each. */
typedef enum bn_status {
    BN_OK = 0,
    BN_ERR_ARGUMENT = 1,     /* a null pointer, or a number out of its documented range */
    BN_ERR_MEMORY = 2,       /* an allocation failed, or could never be filled */
    BN_ERR_IO = 3,           /* open, read, stat or mmap failed */
    BN_ERR_NOT_REGULAR = 4,  /* a directory, FIFO, device or socket */
    BN_ERR_MAGIC = 5,        /* not a packed file */
    BN_ERR_VERSION = 6,      /* a format version, or a required flag, this build does not know */
    BN_ERR_TRUNCATED = 7,    /* the header says more bytes than there are */
    BN_ERR_TRAILING = 8,     /* more bytes than the header says */
    BN_ERR_CHECKSUM = 9,     /* bytes changed since the file was written */
    BN_ERR_SECTION = 10,     /* section table: order, offset, size, overlap, hole, padding */
    BN_ERR_CONFIG = 11,      /* hyperparameters out of range or inconsistent */
    BN_ERR_UNSUPPORTED = 12, /* a valid configuration that this engine cannot run */
    BN_ERR_TENSOR = 13,      /* tensor table: missing, extra, shape, encoding, offset */
    BN_ERR_SCALE = 14,       /* a float that is not finite or out of range, or a scale not > 0 */
    BN_ERR_CODE = 15,        /* a code that its encoding has not, or a sketch not of its codes */
    BN_ERR_CONTEXT = 16,     /* more tokens than the session's context holds */
    BN_ERR_TOKEN = 17,       /* a token id outside [0, vocab_size) */
    BN_ERR_STATE = 18,       /* called in the wrong order, e.g. sample before append, embed after;
                              * or more of a text that has to come whole, or less */
    BN_ERR_CANCELLED = 19,   /* bn_session_cancel() was called, and bn_session_rewind() not yet; or
                              * bn_stop_now() */
    BN_ERR_NUMERIC = 20,     /* a number that was given, or comes out, is not finite; or
                              * every token is ruled out */
    BN_ERR_THREAD = 21,      /* a worker thread could not be started */
    BN_ERR_NO_HEAD = 22,     /* logits asked of a model that has none, see bn_session_embed */
    BN_ERR_NO_TABLE = 23, /* tokens for a model that has no embedding of them: it takes vectors */
    BN_ERR_MASK = 24,     /* not with this model's mask, see bn_mask_kind */
    BN_ERR_INPUT = 25,    /* images for a model that sees none, or a text for one that only sees */
    BN_ERR_CACHE = 26, /* no room for more tokens in bn_load_options.cache_bytes; nothing was done,
                        * and the call can be made again when other sessions gave some back */
    BN_ERR_MODEL = 27  /* a session that another model, or the same with another adapter, has saved;
                        * an adapter of another model, or in place of one */
} bn_status;

/* Sections of the packed file that the engine passes on without reading. */
typedef enum bn_section {
    BN_SECTION_METADATA = 3,  /* UTF-8 JSON: model config, generation defaults, provenance */
    BN_SECTION_TOKENIZER = 4, /* UTF-8 JSON of the `tokenizers` library */
    BN_SECTION_TEMPLATE = 5   /* UTF-8 Jinja chat template */
} bn_section;

typedef enum bn_kv_type {
    BN_KV_F16 = 0,  /* default: half the memory, error about 5e-4 relative per stored value */
    BN_KV_F32 = 1,  /* for comparisons with a reference that keeps fp32 */
    BN_KV_INT8 = 2, /* a quarter of f32 plus a scale; keys, values and queries quantized as
                     * activations are: error of a value at most 1/254 of its row's largest */
    BN_KV_K4V8 = 3, /* values as in int8; keys and queries turned by a Hadamard matrix, keys then in
                     * 4 bits with a scale for every 32: for long texts of large models */
    BN_KV_TYPES = 4 /* how many there are */
} bn_kv_type;

/* Which rows of logits an append call computes. */
typedef enum bn_logits {
    BN_LOGITS_NONE = 0, /* only fill the cache; the head is skipped */
    BN_LOGITS_LAST = 1, /* one row, after the last token */
    BN_LOGITS_ALL = 2   /* one row after every token */
} bn_logits;

/* What a token sees of its text, and so what can be done with it. A sliding window limits each. */
typedef enum bn_mask_kind {
    BN_MASK_CAUSAL = 0,        /* itself and what is before it */
    BN_MASK_BIDIRECTIONAL = 1, /* all: a text comes whole, in one call for an empty session, and
                                * nothing follows it (no sample, step or score) */
    BN_MASK_PREFIX = 2         /* as causal; and all of the prefix, see bn_session_append_prefix */
} bn_mask_kind;

/* How the states of a text's tokens become one vector. */
typedef enum bn_pooling {
    BN_POOL_MODEL = 0, /* as the file says */
    BN_POOL_LAST = 1,  /* the last token's */
    BN_POOL_MEAN = 2,  /* the mean of all */
    BN_POOL_FIRST = 3  /* the first token's */
} bn_pooling;

enum { BN_NO_TOKEN = -1 }; /* stands in a text for a vector */

typedef struct bn_model bn_model;
typedef struct bn_session bn_session;

enum { BN_MOST_ADAPTERS = 1024 }; /* of a model that is open */

typedef struct bn_load_options {
    int32_t threads;      /* 0: min(physical cores, affinity, cgroup quota); at most 256 */
    int32_t no_mmap;      /* 1: read into memory; immune to the file changing, and huge pages */
    int32_t no_verify;    /* 1: skip checksums, scales and codes of the weights (structure is
                           *    always checked). Never reads out of bounds either way. Of a file whose
                           *    sketch of the head is not that of its codes, which verifying refuses,
                           *    a token may then depend on whether the logits were read before. */
    uint64_t cache_bytes; /* most that keys and values of all sessions take, counted in blocks of
                           * 64 tokens; what forks have in common counts once. 0: no limit */
    const char *isa;      /* NULL: best for this CPU, or environment BITNET_ISA; else a tier name */
    const char *const *adapters; /* [n_adapters] files of adapters of this model, of which a session
                                  * can have one (bn_session_options.adapter). What is said of a
                                  * failure begins with "adapter N: ", N from 1 on */
    int32_t n_adapters;          /* at most BN_MOST_ADAPTERS */
    int32_t image_kv_type;       /* bn_kv_type of keys and values of an image. They do not outlive
                                  * it, so that what only saves memory saves nothing: f16 is computed
                                  * as f32, and k4v8 as int8 */
} bn_load_options;

typedef struct bn_model_info {
    /* of what takes tokens; of a model that only sees images, of what takes these */
    uint32_t vocab_size, dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim, max_context;
    uint32_t has_text;        /* 0: it only sees images, and there are no sessions of it */
    uint32_t has_head;        /* 0: no logits, the model embeds */
    uint32_t has_embedding;   /* 0: it takes no tokens, but vectors */
    uint32_t has_draft;       /* 1: it can guess tokens, see bn_session_step */
    uint32_t pooling;         /* bn_pooling of the file; 0: it names none. Of a model that only sees
                               * images see bn_image_info */
    uint32_t width;           /* floats of a text's vector, see bn_session_embed */
    uint32_t mask;            /* bn_mask_kind */
    uint32_t sliding_window;  /* tokens that some layers see, or all; 0: no limit */
    uint64_t file_bytes;      /* size of the packed file */
    uint64_t ternary_weights; /* number of ternary weights, those for images included */
    uint64_t bytes_per_token; /* weight bytes read to decode one token, KV not; of a head with a
                               * sketch the sketch, as sampling needs few rows of the head itself;
                               * bn_session_skipped is not taken off */
    uint64_t macs_per_token;  /* ternary multiply-adds per token, head and attention not */
    uint64_t kv_bytes_per_token[BN_KV_TYPES]; /* cache bytes each token of context adds; those of
                                               * layers that forget what left their window not: */
    uint64_t kv_window_bytes_per_token[BN_KV_TYPES]; /* they add these, for at most
                                                      * sliding_window + batch tokens and what it
                                                      * takes to a multiple of 256 */
    int32_t threads; /* that compute, the caller's included; 1 in a forked child */
    const char *isa; /* tier in use, e.g. "avx512vnni"; static storage */
} bn_model_info;

/* How a model sees. */
typedef struct bn_image_info {
    uint32_t image_size, patch_size; /* pixels of a side */
    uint32_t channels;               /* 1 to 3 */
    uint32_t n_tokens;               /* vectors that an image becomes */
    uint32_t width;                  /* floats of each, and of the vector of a whole image */
    uint32_t pooled;                 /* 1: the file says how they become one, for bn_image_embed */
    float pixel_mean[3];             /* of each channel: what the engine takes away from a value, */
    float pixel_std[3];              /* and what it divides that by */
    int32_t image_token;    /* stands in a prompt for a vector of an image; -1: there is none */
    float similarity_scale; /* vectors a, b of length 1 are as alike as scale · (a · b) + bias; */
    float similarity_bias;  /* scale 0: the file does not say */
    uint64_t macs_per_image; /* ternary multiply-adds through the layers, pooling not */
} bn_image_info;

typedef struct bn_session_options {
    int32_t n_ctx;    /* tokens the cache holds; 0: the model's maximum */
    int32_t kv_type;  /* bn_kv_type */
    int32_t batch;    /* tokens of a prompt computed at a time, at most 4096; 0: 128. Never changes
                       * results. Scratch memory grows with it; with a mask that is not causal
                       * also, by a few rows of floats a token, with n_ctx. */
    int32_t adapter;  /* which of bn_load_options.adapters its text has, from 1 on; 0: none */
    int32_t no_draft; /* 1: it does not keep what the model's draft needs, and never guesses */
} bn_session_options;

/* What a session takes, held against what there is. */
typedef struct bn_session_memory {
    uint64_t needed;        /* bytes of the session once its context is full, as bn_session_bytes,
                             * and of the scratch memory that the sessions of a model share, unless
                             * there is enough of it already */
    uint64_t available;     /* bytes that this process can get now */
    const char *limited_by; /* in words: RLIMIT_AS, RLIMIT_DATA, cgroup, machine; static storage */
    int32_t largest_n_ctx;  /* the longest context that fits with the other options; 0: none */
} bn_session_memory;

/* How the next token is chosen from a row of logits. Order: logit bias and
 * penalties; temperature; top_k; top_p; min_p; and of the tokens kept, each with
 * its probability, the one that noise says. The noise of a token follows from
 * the session's seed, the position and the token's id alone: the same logits at
 * the same position give the same token, whatever was sampled before or between.
 * Zero turns a field off, so a program sets those it wants:
 * (bn_sampler){.temperature = 0.8f}. */
typedef struct bn_sampler {
    float temperature;       /* 0: the largest logit, lowest id on a tie; else > 0 */
    int32_t top_k;           /* keep the k most likely; 0: all */
    float top_p;             /* keep the smallest set with this much probability; to 1; 0: all */
    float min_p;             /* drop what is less likely than min_p times the best; to 1 */
    float repeat_penalty;    /* divides positive, multiplies negative logits; > 0; 0 or 1: off */
    float presence_penalty;  /* subtracted once from tokens already seen */
    float frequency_penalty; /* subtracted per occurrence */
    int32_t penalty_window;  /* how many of the latest tokens the penalties look at; -1: all; 0:
                              * none, so penalties need it */
    int32_t n_bias;          /* entries in the two arrays below */
    const int32_t *bias_tokens;
    const float *bias_values; /* added to the logits; -INFINITY bans a token */
    const uint32_t *allowed;  /* NULL: all tokens. Else only token t may be chosen whose bit, t % 32
                               * of word t / 32, is 1: of (vocab_size + 31) / 32 words for each
                               * token that a call chooses, for bn_session_step max(1, n_draft) rows
                               * of them, row i if the draft is right up to there */
} bn_sampler;

/* --- About this build and this machine --- */

/* Version of the library, "major.minor.patch"; static storage. */
BN_API const char *bn_version(void);

/* One sentence for a status; never NULL; static storage. */
BN_API const char *bn_status_text(bn_status status);

/* Name of the i-th tier that this build has and this CPU runs, best first;
 * the last is "scalar". NULL past the end. Static storage. On Linux this asks the kernel
 * to let the process use AMX, if the CPU has it, as do opening a model and measuring
 * without the name of a lower tier; from then on it refuses stacks for signals without
 * room for tiles (sigaltstack, ENOMEM). */
BN_API const char *bn_isa_name(int32_t i);

/* Name of a bn_kv_type, e.g. "f16"; NULL past the end. Static storage. */
BN_API const char *bn_kv_name(int32_t type);

/* Default number of threads: min(physical cores, affinity, cgroup quota), >= 1. */
BN_API int32_t bn_default_threads(void);

/* Measured limits of this machine, the two walls every figure is held against.
 * bytes: size of the buffer to stream, from 2 MiB on; below 4x the last-level cache it tells how
 * fast that is.
 * Returns gigabytes (1e9) read per second, or int8 multiply-adds (1e9) per
 * second of the tier's dot-product loop with all operands in registers.
 * Fails with BN_ERR_ARGUMENT, BN_ERR_MEMORY or BN_ERR_THREAD. */
BN_API bn_status bn_measure_read_bandwidth(int32_t threads, uint64_t bytes, double *gb_per_s);
BN_API bn_status bn_measure_int8_peak(const char *isa, int32_t threads, double *gmac_per_s);

/* --- Model --- */

/* Map a packed file and check it. `detail`, if not NULL, has BN_DETAIL_SIZE
 * bytes and receives one line on failure, whatever failed: what was found,
 * what was expected; and on success an empty one.
 *
 * The file must not be changed while it is open, unless no_mmap was asked for.
 * Its tables are copied and then checked, so that what another process writes
 * into the mapped file changes numbers but never makes the library read out of
 * bounds. Cut shorter, a mapped file ends the process with SIGBUS. To replace a
 * model, write another file and rename it over this one; one that is open stays
 * what it was.
 *
 * A file that cannot fit is refused with BN_ERR_MEMORY before it is loaded: a
 * mapped one when it is larger than the memory of the machine or of the cgroup,
 * as then each token would read it anew, with no_mmap when it is larger than
 * what is free there; and always when RLIMIT_AS or RLIMIT_DATA forbid it. */
BN_API bn_status bn_model_open(const char *path, const bn_load_options *options, bn_model **model,
                               char *detail);

/* The same on bytes in memory, which must be 64-byte aligned, stay unchanged
 * and outlive the model. */
BN_API bn_status bn_model_open_bytes(const void *bytes, size_t size, const bn_load_options *options,
                                     bn_model **model, char *detail);

/* Close; NULL is allowed. No call may be given it any more, but its sessions go on as before: what
 * they need of it is freed with the last of them. */
BN_API void bn_model_close(bn_model *model);

BN_API bn_status bn_model_get_info(const bn_model *model, bn_model_info *info);

/* Bytes that keys and values of all sessions take now, as bn_load_options.cache_bytes counts them.
 * A block of tokens is given back when the last session that has it is freed or rewound to before
 * it; if cache_bytes is 0, its memory stays with the session that wrote it. */
BN_API uint64_t bn_model_cache_bytes(const bn_model *model);

/* All bytes of the packed file, as they were opened. The pointer lives as long as the model. */
BN_API bn_status bn_model_get_file(const bn_model *model, const uint8_t **bytes, size_t *size);

/* The same of the i-th of its adapters, from 1 on. */
BN_API bn_status bn_model_get_adapter(const bn_model *model, int32_t i, const uint8_t **bytes,
                                      size_t *size);

/* BN_ERR_INPUT when the model sees no images. */
BN_API bn_status bn_model_get_image_info(const bn_model *model, bn_image_info *info);

/* Bytes of an opaque section; *size is 0 and *bytes NULL when the file has none.
 * The pointer lives as long as the model. */
BN_API bn_status bn_model_get_section(const bn_model *model, bn_section which,
                                      const uint8_t **bytes, size_t *size);

/* --- Images: no session is needed. Calls take turns with those on sessions of the model, a turn
 * for every few images, which share the reading of the weights. An image gets the same bits
 * whatever others come with it. Memory is allocated for the call: for So400m/14 at 224 pixels, on 8
 * threads, less than 64 MB, and at most 2 MB more for each further thread; for others as their
 * rows, of which there are 512 at a time, fewer if they are wide, and those of an image at least.
 *
 * Both fail, before any work, with BN_ERR_INPUT when the model sees no images, with BN_ERR_NUMERIC
 * when a pixel is not finite, and with BN_ERR_MEMORY. They fail with BN_ERR_NUMERIC, too, when a
 * number is not finite that they compute, and with BN_ERR_CANCELLED when `stop`, which may be NULL,
 * says so: before any work, or within 512 rows of a layer; then `out` may have been written to. ---
 */

/* Made with {0}, it lives as long as the calls that were given it, of which there may be many. */
typedef struct bn_stop {
    int32_t now; /* 1: they end. To be read and written here alone when no call has it */
} bn_stop;

/* End the calls that were given this, those that run and those that come. */
BN_API void bn_stop_now(bn_stop *stop);

/* n >= 1 images to vectors. pixels: float[n][channels][image_size][image_size], values from 0 to 1,
 * rows from top to bottom. out: float[n][n_tokens][width], behind the projector if there is one:
 * what bn_session_append_prefix takes in place of image tokens, and bn_session_append_embeddings
 * with a causal mask, or the states themselves. */
BN_API bn_status bn_image_encode(const bn_model *model, const float *pixels, int32_t n, float *out,
                                 const bn_stop *stop);

/* n >= 1 images to one vector each, of Euclidean length 1: float[n][width]. BN_ERR_ARGUMENT when
 * the file names no pooling of images (bn_image_info.pooled). */
BN_API bn_status bn_image_embed(const bn_model *model, const float *pixels, int32_t n, float *out,
                                const bn_stop *stop);

/* --- Session: one text and its KV cache. All memory is asked for when it is made: its own, and, if
 * there is not enough of it for this n_ctx and batch, scratch memory that the sessions of a model
 * share, as they take turns, and which goes with the last of them. Until then it stays as large as
 * one of them asked for. Of the cache the system gives the memory of a token when the token comes,
 * and copies share what they have in common, so that a long context costs nothing before it is
 * full, nor does a fork. --- */

/* What bn_session_new would take; NULL options as there. Fails with BN_ERR_ARGUMENT or
 * BN_ERR_INPUT. */
BN_API bn_status bn_session_plan(const bn_model *model, const bn_session_options *options,
                                 bn_session_memory *memory);

/* Fails with BN_ERR_ARGUMENT, with BN_ERR_INPUT when the model only sees images, or with
 * BN_ERR_MEMORY: at once when the session cannot fit once its context is full (see
 * bn_session_plan), or its cache has all of cache_bytes. */
BN_API bn_status bn_session_new(bn_model *model, const bn_session_options *options,
                                bn_session **session);
BN_API void bn_session_free(bn_session *session); /* NULL is allowed */

/* A new session with the same tokens, cache, logits and seed; not cancelled. Both see the same keys
 * and values: who first writes to a block of 64 tokens that they share copies it. So texts that
 * begin alike are best made from one session: fork it, and rewind the copy to where they part.
 * Fails like bn_session_new. */
BN_API bn_status bn_session_fork(const bn_session *session, bn_session **copy);

/* Forget all tokens from position n on (0 forgets everything). Logits become unavailable until the
 * next append, unless n is the current position, which forgets nothing. Takes back a
 * bn_session_cancel. Fails with BN_ERR_ARGUMENT past the end, and with BN_ERR_STATE, changing
 * nothing, when n is neither 0 nor from bn_session_rewind_least to the position. */
BN_API bn_status bn_session_rewind(bn_session *session, int32_t n);

/* The least n, but for 0, that bn_session_rewind takes: it cannot cut a text that came whole or a
 * prefix, nor go back to where layers with a window would have to see what they forgot. */
BN_API int32_t bn_session_rewind_least(const bn_session *session);

/* For measurements at a depth that takes long to compute: hold n tokens, which are the first
 * BN_REPEATED of those held, again and again. Their keys and values are copied, as they are, so
 * that a pass reads as much memory as behind any text of n tokens; what the model then says means
 * nothing. Fails with BN_ERR_STATE where fewer are held or bn_session_rewind does not go back to
 * them, with BN_ERR_ARGUMENT where n is less, and like an append: where there is no memory, they
 * are held alone. */
enum { BN_REPEATED = 64 };
BN_API bn_status bn_session_repeat(bn_session *session, int32_t n);

BN_API int32_t bn_session_position(const bn_session *session); /* tokens held */
BN_API int32_t bn_session_context(const bn_session *session);  /* tokens that fit */
BN_API int32_t bn_session_kv_type(const bn_session *session);  /* of its cache */
BN_API int32_t bn_session_adapter(const bn_session *session);  /* as in bn_session_options */
/* Memory of the session once its context is full; scratch memory that it shares with others is not
 * in it. */
BN_API uint64_t bn_session_bytes(const bn_session *session);
/* Of the weights of the tokens computed here so far (those of a batch count for its first session),
 * bytes that were not read, because all of a
 * line would have been multiplied with 0 (TERNARY_2BIT_ROWS and _COLUMNS of export/FORMAT.md). */
BN_API uint64_t bn_session_skipped(const bn_session *session);

/* The tokens held, oldest first: int32[position], or BN_NO_TOKEN. Lives until
 * the next call that changes it. */
BN_API const int32_t *bn_session_tokens(const bn_session *session);

/* 64 bits of a hash of each row that logits were made from, or can be: of the state of a token
 * behind the last layer, all its bits. uint64[position], 0 for a token of which no logits were
 * asked. Two machines that computed the same have the same numbers. Lives like bn_session_tokens.
 */
BN_API const uint64_t *bn_session_digests(const bn_session *session);

/* --- A session as bytes, for a file (the format: session/saved.c): tokens, cache, seed, and what
 * it takes to go on as if it had never been away, bit for bit; not digests and pools of embeddings.
 * --- */

/* How many bytes bn_session_save writes, with a note of so many. */
BN_API uint64_t bn_session_saved_size(const bn_session *session, uint64_t note_size);

/* note: whatever the program wants to keep with it, which may be NULL when there is none. Fails
 * with BN_ERR_ARGUMENT unless `size` is bn_session_saved_size. */
BN_API bn_status bn_session_save(const bn_session *session, const void *note, uint64_t note_size,
                                 void *bytes, uint64_t size);

/* A new session of what bn_session_save wrote, with the same context, type of cache and batch. The
 * bytes may be anything: every one is checked before it is used, and none is needed afterwards.
 * note: where it lies in them, or NULL, as note_size then is. Fails with BN_ERR_MODEL when it was
 * saved by another one, with BN_ERR_CACHE and BN_ERR_TOKEN as bn_session_append, like
 * bn_session_new, and like bn_model_open for bytes, which says what `detail` receives. */
BN_API bn_status bn_session_load(bn_model *model, const void *bytes, uint64_t size,
                                 bn_session **session, const uint8_t **note, uint64_t *note_size,
                                 char *detail);

/* Take the memory of the next n tokens now, n >= 0, so that no call which appends them fails for
 * want of it: a text can come in pieces, and is refused before the first of them. What no token
 * took goes back when the session is freed or rewound, be it to its position. Fails with
 * BN_ERR_CONTEXT, BN_ERR_CACHE or BN_ERR_MEMORY; then the session is as before. */
BN_API bn_status bn_session_reserve(bn_session *session, int32_t n);

/* Compute n >= 1 tokens. `out`, if not NULL, receives float[rows][vocab_size],
 * rows = 0, 1 or n for BN_LOGITS_NONE, _LAST, _ALL. The last row stays
 * available to bn_session_logits and bn_session_sample unless _NONE.
 * Fails before any work with BN_ERR_CONTEXT, BN_ERR_CACHE or BN_ERR_TOKEN, with
 * BN_ERR_MEMORY when it has to copy what a fork sees and cannot, with BN_ERR_NO_TABLE,
 * BN_ERR_NO_HEAD unless _NONE, and BN_ERR_STATE when the model's mask is
 * bidirectional and the session not empty. On BN_ERR_CANCELLED, and on BN_ERR_NUMERIC when what it
 * computes is not finite, the session keeps the blocks finished so far, and `out` has their rows;
 * unless it was cancelled before, there are no logits. */
BN_API bn_status bn_session_append(bn_session *session, const int32_t *tokens, int32_t n,
                                   bn_logits logits, float *out);

/* The same for vectors in place of tokens: float[n][dim], which enter the stack as they are,
 * without embedding_scale. The text has -1 where they stand; penalties pass it by. Fails with
 * BN_ERR_NUMERIC, before any work, when one is not finite. */
BN_API bn_status bn_session_append_embeddings(bn_session *session, const float *embeddings,
                                              int32_t n, bn_logits logits, float *out);

/* The prefix of a text, in one call: its tokens all see each other, and what is appended later sees
 * them and what is before it. tokens[i] = -1 takes the next row of `embeddings`, float[...][dim],
 * which is NULL when there is none. One turn, however long; of more than bn_session_options.batch
 * tokens a cancel ends it at the next layer, and nothing is kept. Fails with BN_ERR_MASK unless the
 * model's mask is BN_MASK_PREFIX, with BN_ERR_STATE unless the session is empty, and like
 * bn_session_append_embeddings. */
BN_API bn_status bn_session_append_prefix(bn_session *session, const int32_t *tokens,
                                          const float *embeddings, int32_t n, bn_logits logits,
                                          float *out);

/* The current row: float[vocab_size], or NULL when there is none. The head may run only now.
 * Lives until the next call on the session. */
BN_API const float *bn_session_logits(bn_session *session);

/* Append n tokens; out[i] = natural log of the probability of tokens[i] given
 * all before it, float[n]. The first entry is NAN when the session was empty.
 * Sum over the vocabulary in double. Fails like bn_session_append, and then has in out what was
 * computed; with BN_ERR_STATE when
 * the session holds tokens but no logits (an append with BN_LOGITS_NONE, a rewind), and with
 * BN_ERR_MASK when the mask is bidirectional. */
BN_API bn_status bn_session_score(bn_session *session, const int32_t *tokens, int32_t n,
                                  float *out);

/* Append n tokens; out[width] = the hidden states after the final norm of all tokens that the
 * session holds, pooled, multiplied with the projector if the model has one, and divided by their
 * Euclidean length: width = bn_model_info.width, which is dim without a projector. `out` may be
 * NULL: a text may come in pieces, each by this function with the same pooling, and every cut gives
 * the same bits. Any model can embed if a pooling is named; one whose mask is bidirectional takes
 * the text in one piece. Leaves no logits. Fails like bn_session_append; with BN_ERR_ARGUMENT when
 * neither the call nor the file names a pooling, with BN_ERR_STATE when the session holds tokens
 * that came another way. */
BN_API bn_status bn_session_embed(bn_session *session, const int32_t *tokens, int32_t n,
                                  bn_pooling pooling, float *out);

/* The same for vectors in place of tokens, as bn_session_append_embeddings takes them. */
BN_API bn_status bn_session_embed_embeddings(bn_session *session, const float *embeddings,
                                             int32_t n, bn_pooling pooling, float *out);

/* bn_session_embed for n different sessions of one model: text i is tokens[i][0..n_tokens[i]) and
 * goes into sessions[i], out is float[n][width]. Short texts share the reading of the weights; each
 * vector is the same bit for bit. Nothing is done unless all can be, so BN_ERR_CANCELLED when one
 * is cancelled already. Cancelling any of them stops the call at the next block of tokens; each
 * session keeps what it has of its text (bn_session_position), and the others can go on. */
BN_API bn_status bn_embed_batch(bn_session *const *sessions, const int32_t *const *tokens,
                                const int32_t *n_tokens, int32_t n, bn_pooling pooling, float *out);

/* Choose a token from the current logits; NULL sampler: temperature 0. Does
 * not append it, and gives the same when asked again. Penalties look at the
 * session's tokens. Fails with BN_ERR_STATE without logits, BN_ERR_ARGUMENT,
 * BN_ERR_NUMERIC, and BN_ERR_MASK when the mask is bidirectional: then no row
 * is of a next token. */
BN_API bn_status bn_session_sample(bn_session *session, const bn_sampler *sampler, int32_t *token);

/* Sample a token and append it. If it is draft[0], go on with the rest of the draft for as long as
 * each token is what sampling gives anyway; n_draft >= 0. Without a draft go on with guesses of the
 * engine's: what came before where the text repeats itself, or what a draft of the model's own
 * guesses (bn_model_info.has_draft), as far as that is likely to be right and quicker on this
 * machine; but not with bn_sampler.allowed, nor with bn_session_options.no_draft. Guesses are
 * computed together, so right ones are nearly free, and the result is that of n single steps bit
 * for bit.
 * Writes the chosen tokens to tokens[0..*n), 1 <= *n <= most; the session holds these and no more.
 * How many there are depends on the machine, which they are does not. Fails like sample and append;
 * with BN_ERR_CONTEXT when not one more token fits. */
BN_API bn_status bn_session_step(bn_session *session, const bn_sampler *sampler,
                                 const int32_t *draft, int32_t n_draft, int32_t *tokens,
                                 int32_t most, int32_t *n);

/* What the model's own draft guesses, sampling like bn_session_step, to come behind `token`, were
 * that the next: guesses[0..*n), *n <= most, and how likely it holds each, if those before are
 * right: confidences[0..*n). *n is 0 without a draft, and where it does not know the text: which
 * was scored, embedded, or just rewound. Nothing is appended. Fails like bn_session_append. */
BN_API bn_status bn_session_guess(bn_session *session, const bn_sampler *sampler, int32_t token,
                                  int32_t most, int32_t *guesses, float *confidences, int32_t *n);

/* What one of several texts does in a pass: it goes on with tokens, and chooses what follows. */
typedef struct bn_entry {
    bn_session *session;
    const int32_t *tokens; /* int32[n_tokens], n_tokens >= 1: a piece of a prompt, or what was */
    int32_t n_tokens;      /* chosen last */
    int32_t most;          /* tokens to choose; 0: none, and there will be no logits */
    float moment;          /* seconds: a text alone, without `draft` and `allowed`, goes on in more
                            * passes for as long as fewer have passed; 0: one pass */
    const bn_sampler *sampler; /* NULL: temperature 0. A row of `allowed` for each token chosen, or
                                * for one */
    const int32_t *draft; /* int32[n_draft], n_draft >= 0: guesses of what will be chosen, for */
    int32_t n_draft;      /* one token; without any the engine may guess */
    int32_t *chosen;      /* out: int32[most], of this text alone: threads choose side by side */
    int32_t n_chosen;     /* out: how many; at least one if most > 0 and all went well */
    bn_status status;     /* out: what became of this text */
} bn_entry;

/* One pass for n texts, different sessions of one model, which read the weights once: append the
 * tokens of each, then choose. Of the tokens chosen all but the last are appended, too, because
 * they had been guessed and computed with the others: what is chosen last is the next call's to go
 * on with. All are what calls for one text and one token give, bit for bit. A text that fails is as
 * bn_session_append leaves it, and the others go on; returns the first status that is not BN_OK.
 * BN_ERR_ARGUMENT for what no text can do, before any work. More than fits is done in several
 * turns. A cancel while it runs ends the piece of a prompt that is longer than
 * bn_session_options.batch after the block it is at; else it counts from the next call on. */
BN_API bn_status bn_step_batch(bn_entry *entries, int32_t n);

/* Choose tokens with the noise of this seed from now on; a new session has seed 0. Fork a session
 * and seed its copies to have several texts. */
BN_API void bn_session_seed(bn_session *session, uint64_t seed);

/* Stop what this session does: from any thread, at any moment before it is freed. From then on
 * append, score, embed, sample, step and the batches fail with BN_ERR_CANCELLED before any work,
 * and one of them that is running ends after the block of tokens it is at
 * (bn_session_options.batch; of texts that are embedded together, up to 512), with BN_ERR_CANCELLED
 * if that was not the last. So it stays until bn_session_rewind is called, which may be at any n,
 * the current position too. What the session holds can be read all the while. */
BN_API void bn_session_cancel(bn_session *session);

/* 1 from bn_session_cancel to bn_session_rewind, else 0. */
BN_API int32_t bn_session_cancelled(const bn_session *session);

/* cffi-end */

#ifdef __cplusplus
}
#endif
#endif
