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
 * It ends with BN_OK at eos, with BN_ERR_CONTEXT when the context is full, and with another status
 * when something fails. runtime_c/examples has complete programs.
 *
 * Determinism. The logits of a token depend on the model file, the adapter, the KV cache type and
 * the tokens before it. They do not depend, in any bit, on the instruction set, the number of
 * threads, how a text was split into append calls, or the floating-point environment (rounding,
 * flush-to-zero) of the calling thread, which every call saves and restores.
 *
 * Errors. Every function that can fail returns a bn_status; 0 is success. The library never prints,
 * exits, aborts or keeps a last error. On failure, out parameters are unchanged unless a comment
 * says otherwise.
 *
 * Threads. A bn_model is immutable and may be shared; a bn_session belongs to one caller at a time.
 * Calls on sessions of one model take turns on the model's thread pool, in the order they arrive. A
 * turn is a token, a draft, a few images, or a block of a prompt (bn_session_options.batch), so a
 * generating session never waits for another's whole prompt; only a prefix or a bidirectional text
 * is always a single turn. Planning and creating a session also wait for a turn, and so does
 * freeing the last session of a model; freeing any other does not. Only bn_session_cancel and
 * bn_stop_now may be called at any time, even from a signal handler. After fork(), the child may
 * continue with models and sessions that were idle; it computes with one thread, because only the
 * forking thread exists in the child. To use more threads it opens the model again. A call takes
 * less than 128 KB of the caller's stack.
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

/* cffi-begin: plain C only from here to cffi-end, read by build_cffi.py */

#define BN_DETAIL_SIZE 256 /* bytes of the buffer that receives an explanation */

/* One value for each kind of failure; bn_status_text() describes each in a sentence. */
typedef enum bn_status {
    BN_OK = 0,
    BN_ERR_ARGUMENT = 1,     /* a null pointer, or a number out of its documented range */
    BN_ERR_MEMORY = 2,       /* an allocation failed, or would exceed memory once filled */
    BN_ERR_IO = 3,           /* open, read, stat or mmap failed */
    BN_ERR_NOT_REGULAR = 4,  /* a directory, FIFO, device or socket */
    BN_ERR_MAGIC = 5,        /* not a packed file */
    BN_ERR_VERSION = 6,      /* a format version or required flag unknown to this build */
    BN_ERR_TRUNCATED = 7,    /* fewer bytes than the header says */
    BN_ERR_TRAILING = 8,     /* more bytes than the header says */
    BN_ERR_CHECKSUM = 9,     /* bytes changed since the file was written */
    BN_ERR_SECTION = 10,     /* section table: order, offset, size, overlap, hole, padding */
    BN_ERR_CONFIG = 11,      /* hyperparameters out of range or inconsistent */
    BN_ERR_UNSUPPORTED = 12, /* a valid configuration that this engine cannot run */
    BN_ERR_TENSOR = 13,      /* tensor table: missing, extra, shape, encoding, offset */
    BN_ERR_SCALE = 14,       /* a float that is not finite or out of range, or a scale not > 0 */
    BN_ERR_CODE = 15,        /* a code invalid in its encoding, or a sketch that contradicts its
                              * codes */
    BN_ERR_CONTEXT = 16,     /* more tokens than the session's context holds */
    BN_ERR_TOKEN = 17,       /* a token id outside [0, vocab_size) */
    BN_ERR_STATE = 18,       /* called in the wrong order, e.g. sample before append, or embed after
                              * it; or more or less of a text that must come whole */
    BN_ERR_CANCELLED = 19,   /* bn_session_cancel() was called without a bn_session_rewind() since;
                              * or bn_stop_now() */
    BN_ERR_NUMERIC = 20,     /* an input or computed value is not finite, or every token is ruled
                              * out */
    BN_ERR_THREAD = 21,      /* a worker thread could not be started */
    BN_ERR_NO_HEAD = 22,     /* logits requested of a model without a head, see bn_session_embed */
    BN_ERR_NO_TABLE = 23, /* tokens given to a model without an embedding table: it takes vectors */
    BN_ERR_MASK = 24,     /* not possible with this model's mask, see bn_mask_kind */
    BN_ERR_INPUT = 25,    /* images for a model without vision, or a text for a vision-only model */
    BN_ERR_CACHE = 26,    /* no room for more tokens within bn_load_options.cache_bytes; nothing was
                           * done, and the call can be repeated once other sessions have released
                           * some */
    BN_ERR_MODEL = 27     /* a session saved by another model or with another adapter; an adapter of
                           * another model, or an adapter opened as a model */
} bn_status;

/* Sections of the packed file that the engine returns without reading them. */
typedef enum bn_section {
    BN_SECTION_METADATA = 3,  /* UTF-8 JSON: model config, provenance, and `generation`: end tokens,
                               * and options of sampling (export/FORMAT.md, 5) */
    BN_SECTION_TOKENIZER = 4, /* UTF-8 JSON of the `tokenizers` library */
    BN_SECTION_TEMPLATE = 5   /* UTF-8 Jinja chat template */
} bn_section;

typedef enum bn_kv_type {
    BN_KV_F16 = 0,  /* default: half the memory, error about 5e-4 relative per stored value, of a
                     * tiny one up to 3e-8; one beyond ±65504 becomes ±65504 */
    BN_KV_F32 = 1,  /* for comparisons with a reference that keeps fp32 */
    BN_KV_INT8 = 2, /* a quarter of f32 plus a scale; keys, values and queries are quantized like
                     * activations: error of a value at most 1/254 of the largest in its row, or
                     * 4e-8 */
    BN_KV_K4V8 = 3, /* values as in int8; keys and queries rotated by a Hadamard matrix, keys then
                     * quantized to 4 bits with a scale per 32: for long texts of large models */
    BN_KV_TYPES = 4 /* number of types */
} bn_kv_type;

/* Which rows of logits an append call computes. */
typedef enum bn_logits {
    BN_LOGITS_NONE = 0, /* only fill the cache; the head is skipped */
    BN_LOGITS_LAST = 1, /* one row, after the last token */
    BN_LOGITS_ALL = 2   /* one row after every token */
} bn_logits;

/* Which tokens of its text a token attends to, and therefore what can be done with the text. A
 * sliding window limits each. */
typedef enum bn_mask_kind {
    BN_MASK_CAUSAL = 0,        /* itself and all tokens before it */
    BN_MASK_BIDIRECTIONAL = 1, /* all tokens: a text comes whole, in one call for an empty session,
                                * and nothing follows it (no sample, step or score) */
    BN_MASK_PREFIX = 2         /* as causal; within the prefix all tokens see each other, see
                                * bn_session_append_prefix */
} bn_mask_kind;

/* How the hidden states of a text's tokens are pooled into one vector. */
typedef enum bn_pooling {
    BN_POOL_MODEL = 0, /* as the file specifies */
    BN_POOL_LAST = 1,  /* the last token's */
    BN_POOL_MEAN = 2,  /* the mean of all */
    BN_POOL_FIRST = 3  /* the first token's */
} bn_pooling;

enum { BN_NO_TOKEN = -1 }; /* stands for a vector in an array of tokens */

typedef struct bn_model bn_model;
typedef struct bn_session bn_session;

enum { BN_MOST_ADAPTERS = 1024 }; /* per open model */

/* Initialize with {0}, as all options here: a field that is zero has its default. NULL in place of
 * options means the same. */
typedef struct bn_load_options {
    int32_t threads;      /* 0: min(physical cores, affinity, cgroup quota); at most 256 */
    int32_t no_mmap;      /* 1: read into memory, in huge pages; later changes of the file have no
                           * effect */
    int32_t no_verify;    /* 1: do not verify checksums, scales and codes of the weights (the
                           * structure is always checked). Never reads out of bounds either way. If
                           * the sketch of the head does not match its codes, which verification
                           * refuses, a token may depend on whether the logits were read before. */
    uint64_t cache_bytes; /* limit for the keys and values of all sessions, counted in blocks of 64
                           * tokens; blocks shared by forks count once. 0: no limit */
    const char *isa;      /* tier name; NULL: environment variable BITNET_ISA if set, else the best
                           * for this CPU */
    const char *const *adapters; /* [n_adapters] paths of adapter files for this model; a session
                                  * can use one (bn_session_options.adapter). `detail` of a failure
                                  * in one begins with "adapter N: ", N counting from 1 */
    int32_t n_adapters;          /* at most BN_MOST_ADAPTERS */
    int32_t image_kv_type;       /* bn_kv_type for the keys and values of images. They are discarded
                                  * after each image, so saving memory gains nothing: f16 is
                                  * computed as f32, and k4v8 as int8 */
} bn_load_options;

typedef struct bn_model_info {
    /* of the text stack; for a vision-only model, of the vision stack */
    uint32_t vocab_size, dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim, max_context;
    uint32_t has_text;        /* 0: a vision-only model, without sessions */
    uint32_t has_head;        /* 0: no logits, embeddings only */
    uint32_t has_embedding;   /* 0: it takes vectors instead of tokens */
    uint32_t has_draft;       /* 1: it has a draft head, see bn_session_step */
    uint32_t pooling;         /* bn_pooling of the file; 0: it specifies none. For a vision-only
                               * model see bn_image_info */
    uint32_t width;           /* floats in the embedding of a text, see bn_session_embed */
    uint32_t mask;            /* bn_mask_kind */
    uint32_t sliding_window;  /* window of some or all layers, in tokens; 0: no limit */
    uint64_t file_bytes;      /* size of the packed file */
    uint64_t parameters;      /* numbers in the tensors of all stacks that training learned */
    uint64_t ternary_weights; /* number of ternary weights, including those of the vision stack */
    uint64_t bytes_per_token; /* weight bytes read to decode one token, without the KV cache. For a
                               * head with a sketch only the sketch counts, as sampling needs few
                               * rows of the head itself; bn_session_skipped is not subtracted */
    uint64_t macs_per_token;  /* ternary multiply-adds per token, without head and attention */
    uint64_t kv_bytes_per_token[BN_KV_TYPES];        /* cache bytes per token of context, except in
                                                      * layers that forget what is outside their
                                                      * window: */
    uint64_t kv_window_bytes_per_token[BN_KV_TYPES]; /* what those layers add per token, for at most
                                                      * sliding_window + batch tokens, rounded up to
                                                      * a multiple of 256 */
    int32_t threads; /* computing threads, the caller's included; 1 in a forked child */
    const char *isa; /* tier in use, e.g. "avx512vnni"; static storage */
} bn_model_info;

/* Input and output of a model's vision stack. */
typedef struct bn_image_info {
    uint32_t image_size, patch_size; /* side length in pixels */
    uint32_t channels;               /* 1 to 3 */
    uint32_t n_tokens;               /* vectors per image */
    uint32_t width;                  /* floats in each, and in the vector of a whole image */
    uint32_t pooled;                 /* 1: the file specifies a pooling, for bn_image_embed */
    float pixel_mean[3];             /* per channel: the engine computes (value - mean) / std */
    float pixel_std[3];
    int32_t image_token;     /* stands for a vector of an image in a prompt; -1: none */
    float similarity_scale;  /* similarity of unit vectors a and b: scale · (a · b) + bias; */
    float similarity_bias;   /* scale 0: the file specifies none */
    uint64_t macs_per_image; /* ternary multiply-adds of the layers, without pooling */
} bn_image_info;

typedef struct bn_session_options {
    int32_t n_ctx;    /* capacity of the cache in tokens; 0: the model's maximum */
    int32_t kv_type;  /* bn_kv_type */
    int32_t batch;    /* tokens of a prompt computed at a time, at most 4096; 0: 128. Never changes
                       * results. Scratch memory grows with it, and with a non-causal mask also with
                       * n_ctx, by a few rows of floats per token. */
    int32_t adapter;  /* 1-based index into bn_load_options.adapters; 0: none */
    int32_t no_draft; /* 1: do not keep the states that the draft head needs, and never draft */
} bn_session_options;

/* Memory that a session would need, and what is available. */
typedef struct bn_session_memory {
    uint64_t needed;        /* bytes of the session with a full context, as bn_session_bytes, plus
                             * the scratch memory shared by the sessions of a model, unless enough
                             * of it is already allocated */
    uint64_t available;     /* bytes that this process can allocate now */
    const char *limited_by; /* a phrase for a message: which limit of RLIMIT_AS, RLIMIT_DATA, cgroup
                             * and machine is the lowest; static storage */
    int32_t largest_n_ctx;  /* the longest context that fits with the other options; 0: none */
} bn_session_memory;

/* How the next token is chosen from a row of logits. Order: logit bias and penalties; temperature;
 * top_k; top_p; min_p; then one of the remaining tokens is drawn by its probability, using noise.
 * The noise of a token depends only on the session's seed, the position and the token's id: the
 * same logits at the same position give the same token, whatever was sampled before. A field that
 * is zero is off, so a program sets only those it wants: (bn_sampler){.temperature = 0.8f}. */
typedef struct bn_sampler {
    float temperature;       /* 0: the largest logit, lowest id on a tie; else > 0 */
    int32_t top_k;           /* keep the k most likely; 0: all */
    float top_p;             /* keep the smallest set of this probability; at most 1; 0: all */
    float min_p;             /* drop tokens less likely than min_p times the best; at most 1 */
    float repeat_penalty;    /* divides positive, multiplies negative logits; > 0; 0 or 1: off */
    float presence_penalty;  /* subtracted once from tokens already seen */
    float frequency_penalty; /* subtracted per occurrence */
    int32_t penalty_window;  /* how many of the latest tokens the penalties cover; -1: all; 0: none,
                              * which turns penalties off */
    int32_t n_bias;          /* entries in the two arrays below */
    const int32_t *bias_tokens;
    const float *bias_values; /* added to the logits; -INFINITY bans a token */
    const uint32_t *allowed;  /* NULL: all tokens. Else a bit mask: token t may be chosen only if
                               * bit t % 32 of word t / 32 is 1. A row has (vocab_size + 31) / 32
                               * words, one row per token that a call chooses; for bn_session_step
                               * max(1, n_draft) rows, where row i applies if the draft is right up
                               * to there */
} bn_sampler;

/* --- About this build and this machine --- */

/* Version of the library, "major.minor.patch"; static storage. Another minor version may have other
 * structs, so a program that declares them itself compares both numbers. */
BN_API const char *bn_version(void);

/* One sentence for a status; never NULL; static storage. */
BN_API const char *bn_status_text(bn_status status);

/* Name of the i-th tier that this build contains and this CPU supports, best first; the last is
 * "scalar". NULL past the end. Static storage. On Linux, this function asks the kernel for
 * permission to use AMX if the CPU has it; so do opening a model and measuring, unless a lower tier
 * is named. From then on the kernel refuses alternate signal stacks too small for the tile state
 * (sigaltstack, ENOMEM). */
BN_API const char *bn_isa_name(int32_t i);

/* Name of a bn_kv_type, e.g. "f16"; NULL past the end. Static storage. */
BN_API const char *bn_kv_name(int32_t type);

/* Default number of threads: min(physical cores, affinity, cgroup quota), >= 1. */
BN_API int32_t bn_default_threads(void);

/* Measured limits of this machine, against which every speed is compared. threads: 1 to 256; 0 is
 * refused. bytes: size of the buffer to stream, at least 2 MiB and less than 1 TiB; below 4x the
 * last-level cache it measures the cache. isa: tier name; NULL: the best, whatever BITNET_ISA says.
 * Returns gigabytes (1e9) read per second, or int8 multiply-adds (1e9) per second of the tier's
 * dot-product loop with all operands in registers. Fails with BN_ERR_ARGUMENT, BN_ERR_MEMORY or
 * BN_ERR_THREAD. */
BN_API bn_status bn_measure_read_bandwidth(int32_t threads, uint64_t bytes, double *gb_per_s);
BN_API bn_status bn_measure_int8_peak(const char *isa, int32_t threads, double *gmac_per_s);

/* --- Model --- */

/* Map a packed file and check it. `detail`, if not NULL, has BN_DETAIL_SIZE bytes; on any failure
 * it receives one line that says what was found and what was expected, on success an empty string.
 *
 * The file must not be changed while it is open, unless no_mmap is set. Its tables are copied and
 * then checked, so a process that writes into the mapped file can change numbers but never make the
 * library read out of bounds. Truncating a mapped file ends the process with SIGBUS. To replace a
 * model, write another file and rename it over this one; a model that is already open keeps the old
 * file.
 *
 * A file that cannot fit in memory is refused with BN_ERR_MEMORY before it is loaded: a mapped file
 * if it is larger than the memory of the machine or the cgroup, because every token would then read
 * it again from disk; with no_mmap a file larger than what is free there; and any file that
 * RLIMIT_AS or RLIMIT_DATA forbid. */
BN_API bn_status bn_model_open(const char *path, const bn_load_options *options, bn_model **model,
                               char *detail);

/* The same for bytes in memory, which must be 64-byte aligned, stay unchanged and outlive the
 * model. */
BN_API bn_status bn_model_open_bytes(const void *bytes, size_t size, const bn_load_options *options,
                                     bn_model **model, char *detail);

/* Close a model; NULL is allowed. It must not be passed to any further call, but its sessions
 * remain usable: what they need is freed with the last of them. */
BN_API void bn_model_close(bn_model *model);

BN_API bn_status bn_model_get_info(const bn_model *model, bn_model_info *info);

/* Bytes that the keys and values of all sessions take now, counted as in
 * bn_load_options.cache_bytes. A block of tokens is released when the last session that uses it is
 * freed or rewound to before it; if cache_bytes is 0, its memory stays with the session that wrote
 * it. */
BN_API uint64_t bn_model_cache_bytes(const bn_model *model);

/* All bytes of the packed file as opened. The pointer lives as long as the model. */
BN_API bn_status bn_model_get_file(const bn_model *model, const uint8_t **bytes, size_t *size);

/* The same for the model's i-th adapter, counting from 1. */
BN_API bn_status bn_model_get_adapter(const bn_model *model, int32_t i, const uint8_t **bytes,
                                      size_t *size);

/* Fails with BN_ERR_INPUT if the model has no vision stack. */
BN_API bn_status bn_model_get_image_info(const bn_model *model, bn_image_info *info);

/* Bytes of an opaque section; *size is 0 and *bytes NULL if the file has none. The pointer lives as
 * long as the model. */
BN_API bn_status bn_model_get_section(const bn_model *model, bn_section which,
                                      const uint8_t **bytes, size_t *size);

/* --- Images: no session is needed. Calls take turns with those on sessions of the model, one turn
 * per few images, which share a single read of the weights. An image gets the same bits whatever
 * else is in the call. Memory is allocated for the duration of the call: for So400m/14 at 224
 * pixels, on 8 threads, less than 64 MB, and at most 2 MB more for each further thread; for other
 * models in proportion to their rows: 512 at a time, fewer if they are wide, and at least those of
 * one image.
 *
 * Both functions fail before any work with BN_ERR_INPUT if the model has no vision stack, with
 * BN_ERR_NUMERIC if a pixel is not finite, and with BN_ERR_MEMORY. They also fail with
 * BN_ERR_NUMERIC if a computed value is not finite, and with BN_ERR_CANCELLED if `stop`, which may
 * be NULL, is set: before any work, or within 512 rows of a layer; `out` may then be partly
 * written. ---
 */

/* Initialize with {0}. It must outlive the calls that it is passed to, of which there may be
 * many. */
typedef struct bn_stop {
    int32_t now; /* 1: these calls end. Read or write it directly only while no call uses it */
} bn_stop;

/* End all calls that were given this, running or future. */
BN_API void bn_stop_now(bn_stop *stop);

/* n >= 1 images to vectors. pixels: float[n][channels][image_size][image_size], values from 0 to 1,
 * rows from top to bottom. out: float[n][n_tokens][width], the output of the projector if there is
 * one, else the hidden states: vectors for bn_session_append_prefix in place of image tokens, or
 * with a causal mask for bn_session_append_embeddings. */
BN_API bn_status bn_image_encode(const bn_model *model, const float *pixels, int32_t n, float *out,
                                 const bn_stop *stop);

/* n >= 1 images to one vector each, of Euclidean length 1: float[n][width]. BN_ERR_ARGUMENT if the
 * file specifies no pooling of images (bn_image_info.pooled). */
BN_API bn_status bn_image_embed(const bn_model *model, const float *pixels, int32_t n, float *out,
                                const bn_stop *stop);

/* --- Session: one text and its KV cache. All memory is reserved when a session is created: its
 * own, and scratch memory shared by the sessions of a model, as they take turns, which grows if it
 * is too small for this n_ctx and batch and is freed with the last of them. The system commits the
 * cache memory of a token only when the token is written, and forks share what they have in common,
 * so a long context costs nothing until it is filled, and a fork costs nothing. --- */

/* Memory that bn_session_new would need; options may be NULL as there. Fails with BN_ERR_ARGUMENT
 * or BN_ERR_INPUT. */
BN_API bn_status bn_session_plan(const bn_model *model, const bn_session_options *options,
                                 bn_session_memory *memory);

/* Fails with BN_ERR_ARGUMENT, with BN_ERR_INPUT for a vision-only model, and with BN_ERR_MEMORY: at
 * once if the session cannot fit with a full context (see bn_session_plan), or, if cache_bytes is
 * less than such a cache, with a cache of cache_bytes. */
BN_API bn_status bn_session_new(bn_model *model, const bn_session_options *options,
                                bn_session **session);
BN_API void bn_session_free(bn_session *session); /* NULL is allowed */

/* A new session with the same tokens, cache, logits and seed; not cancelled. The two share a paged
 * KV cache, copy on write in blocks of 64 tokens. So texts with a common prefix are best made from
 * one session: fork it, and rewind the copy to where they diverge. Fails like bn_session_new. */
BN_API bn_status bn_session_fork(const bn_session *session, bn_session **copy);

/* Forget all tokens from position n on (0 forgets everything). Logits become unavailable until the
 * next append, unless n is the current position, which forgets nothing. Clears a bn_session_cancel.
 * Fails with BN_ERR_ARGUMENT past the end, and, changing nothing, with BN_ERR_STATE if n is neither
 * 0 nor in the range from bn_session_rewind_least to the position. */
BN_API bn_status bn_session_rewind(bn_session *session, int32_t n);

/* The least n besides 0 that bn_session_rewind accepts: it cannot cut a bidirectional text or a
 * prefix, nor go back to where layers with a window would need tokens they have forgotten. */
BN_API int32_t bn_session_rewind_least(const bn_session *session);

/* For measurements at a depth that takes long to compute: hold n tokens, the first BN_REPEATED of
 * those held, repeated. Their keys and values are copied unchanged, so a pass reads as much memory
 * as after any text of n tokens; the model's output then means nothing. Fails with BN_ERR_STATE if
 * fewer are held or bn_session_rewind cannot go back to them, with BN_ERR_ARGUMENT if n is less
 * than BN_REPEATED, and like an append; without memory for more, the session is left with these
 * BN_REPEATED tokens. */
enum { BN_REPEATED = 64 };
BN_API bn_status bn_session_repeat(bn_session *session, int32_t n);

BN_API int32_t bn_session_position(const bn_session *session); /* tokens held */
BN_API int32_t bn_session_context(const bn_session *session);  /* capacity in tokens */
BN_API int32_t bn_session_kv_type(const bn_session *session);  /* bn_kv_type of its cache */
BN_API int32_t bn_session_adapter(const bn_session *session);  /* as in bn_session_options */
/* Bytes of the session with a full context, without the scratch memory that it shares with
 * others. */
BN_API uint64_t bn_session_bytes(const bn_session *session);
/* Bytes of weights that were not read for the tokens computed in this session so far (a batch
 * counts for its first session), because a whole row or column would have been multiplied by 0
 * (TERNARY_2BIT_ROWS and _COLUMNS of export/FORMAT.md). */
BN_API uint64_t bn_session_skipped(const bn_session *session);

/* The tokens held, oldest first: int32[position], BN_NO_TOKEN for a vector. Valid until the next
 * call that changes the session. */
BN_API const int32_t *bn_session_tokens(const bn_session *session);

/* A 64-bit hash of each row that logits were, or can be, computed from: over all bits of a token's
 * state after the last layer. uint64[position], 0 for a token whose logits were not requested. Two
 * machines that computed the same have the same hashes. Valid as long as bn_session_tokens.
 */
BN_API const uint64_t *bn_session_digests(const bn_session *session);

/* --- A session as bytes, for a file (the format: session/saved.c): tokens, cache, seed, and all
 * that is needed to continue bit for bit; without digests and pools of embeddings. --- */

/* Bytes that bn_session_save writes with a note of note_size bytes. */
BN_API uint64_t bn_session_saved_size(const bn_session *session, uint64_t note_size);

/* note: any bytes that the program wants to keep with the session; may be NULL if note_size is 0.
 * Fails with BN_ERR_ARGUMENT unless `size` is bn_session_saved_size. */
BN_API bn_status bn_session_save(const bn_session *session, const void *note, uint64_t note_size,
                                 void *bytes, uint64_t size);

/* A new session from what bn_session_save wrote, with the same context, cache type, batch and
 * adapter (the first of equal ones). The bytes need not be trusted: every one is checked before it
 * is used, and none is needed afterwards. note: where the note lies in them; note and note_size may
 * both be NULL. Fails with BN_ERR_MODEL if another model saved it, with BN_ERR_CACHE and
 * BN_ERR_TOKEN as bn_session_append, like bn_session_new, and like bn_model_open for invalid bytes;
 * `detail` receives what it does there. */
BN_API bn_status bn_session_load(bn_model *model, const void *bytes, uint64_t size,
                                 bn_session **session, const uint8_t **note, uint64_t *note_size,
                                 char *detail);

/* Allocate the memory of the next n >= 0 tokens now, so that appending them cannot fail for lack of
 * it: a text that comes in pieces is refused before the first one. Memory not used by tokens is
 * released when the session is freed or rewound, even to its current position. Fails with
 * BN_ERR_CONTEXT, BN_ERR_CACHE or BN_ERR_MEMORY; the session is then unchanged. */
BN_API bn_status bn_session_reserve(bn_session *session, int32_t n);

/* Compute n >= 1 tokens. `out`, if not NULL, receives float[rows][vocab_size], rows = 0, 1 or n for
 * BN_LOGITS_NONE, _LAST, _ALL. The last row stays available to bn_session_logits and
 * bn_session_sample unless _NONE. Fails before any work with BN_ERR_CONTEXT, BN_ERR_CACHE or
 * BN_ERR_TOKEN; with BN_ERR_MEMORY if a block shared with a fork cannot be copied; with
 * BN_ERR_NO_TABLE; with BN_ERR_NO_HEAD unless _NONE; and with BN_ERR_STATE if the model's mask is
 * bidirectional and the session not empty. On BN_ERR_CANCELLED, and on BN_ERR_NUMERIC for a
 * computed value that is not finite, the session keeps the blocks finished so far, and `out` has
 * their rows; no logits are available then, unless the session was already cancelled before the
 * call. */
BN_API bn_status bn_session_append(bn_session *session, const int32_t *tokens, int32_t n,
                                   bn_logits logits, float *out);

/* The same for vectors in place of tokens: float[n][dim], which enter the stack unchanged, without
 * embedding_scale. bn_session_tokens has BN_NO_TOKEN in their places; penalties skip it. Fails with
 * BN_ERR_NUMERIC, before any work, if a value is not finite. */
BN_API bn_status bn_session_append_embeddings(bn_session *session, const float *embeddings,
                                              int32_t n, bn_logits logits, float *out);

/* The prefix of a text, in one call: its tokens all see each other, and tokens appended later see
 * the prefix and what is before them. tokens[i] = BN_NO_TOKEN takes the next row of `embeddings`,
 * float[...][dim], which is NULL if there are none. A single turn, however long; if it has more
 * than bn_session_options.batch tokens, a cancel ends it at the next layer, and nothing is kept.
 * Fails with BN_ERR_MASK unless the model's mask is BN_MASK_PREFIX, with BN_ERR_STATE unless the
 * session is empty, and like bn_session_append_embeddings. */
BN_API bn_status bn_session_append_prefix(bn_session *session, const int32_t *tokens,
                                          const float *embeddings, int32_t n, bn_logits logits,
                                          float *out);

/* The current row of logits: float[vocab_size], or NULL if there is none, or if what they would be
 * computed from is not finite. May compute the head first. Valid until the next call on the
 * session. */
BN_API const float *bn_session_logits(bn_session *session);

/* Append n tokens; out[i] = natural log of the probability of tokens[i] given all before it,
 * float[n]. The first entry is NAN if the session was empty. The sum over the vocabulary is taken
 * in double. Fails like bn_session_append, with what was computed so far in `out`; with
 * BN_ERR_STATE if the session holds tokens but no logits (after an append with BN_LOGITS_NONE or a
 * rewind), and with BN_ERR_MASK if the mask is bidirectional. */
BN_API bn_status bn_session_score(bn_session *session, const int32_t *tokens, int32_t n,
                                  float *out);

/* Append n tokens; out[width] = the hidden states after the final norm of all tokens of the
 * session, pooled, multiplied by the projector if the model has one, and divided by their Euclidean
 * length: width = bn_model_info.width, which is dim without a projector. `out` may be NULL: a text
 * may come in pieces, each through this function with the same pooling, and every split gives the
 * same bits. Any model can embed if a pooling is named; one with a bidirectional mask takes the
 * text in one piece. Leaves no logits. Fails like bn_session_append; with BN_ERR_ARGUMENT if
 * neither the call nor the file specifies a pooling, and with BN_ERR_STATE if the session holds
 * tokens that were not embedded, or were with another pooling, or were left by a rewind, which
 * keeps no pool: to embed texts with a common prefix, fork the session before they diverge. On
 * BN_ERR_NUMERIC `out` may be partly written; the session is left empty if only the vector is not
 * finite. */
BN_API bn_status bn_session_embed(bn_session *session, const int32_t *tokens, int32_t n,
                                  bn_pooling pooling, float *out);

/* The same for vectors in place of tokens, as bn_session_append_embeddings takes them. */
BN_API bn_status bn_session_embed_embeddings(bn_session *session, const float *embeddings,
                                             int32_t n, bn_pooling pooling, float *out);

/* bn_session_embed for n different sessions of one model: text i is tokens[i][0..n_tokens[i]) and
 * goes into sessions[i]; out is float[n][width]. Short texts share one read of the weights; each
 * vector is the same bit for bit. All are checked, and memory is reserved for all, before any work;
 * so if one session is already cancelled, nothing is done (BN_ERR_CANCELLED). Cancelling any of
 * them stops the call at the next block of tokens; each session keeps what it has of its text
 * (bn_session_position), and the others can continue. The same holds on BN_ERR_NUMERIC; the first
 * session that lacks a part of its text is the one with the value that is not finite. */
BN_API bn_status bn_embed_batch(bn_session *const *sessions, const int32_t *const *tokens,
                                const int32_t *n_tokens, int32_t n, bn_pooling pooling, float *out);

/* Choose a token from the current logits; a NULL sampler means temperature 0. Does not append it; a
 * repeated call gives the same token. Penalties look at the session's tokens. Fails with
 * BN_ERR_STATE without logits, with BN_ERR_ARGUMENT, with BN_ERR_NUMERIC, and with BN_ERR_MASK if
 * the mask is bidirectional, as no row then predicts a next token. */
BN_API bn_status bn_session_sample(bn_session *session, const bn_sampler *sampler, int32_t *token);

/* Speculative decoding: sample a token and append it. If it is draft[0], continue with the rest of
 * the draft for as long as each token is what sampling gives anyway; n_draft >= 0. Without a draft,
 * continue with draft tokens of the engine: by n-gram lookup where the text repeats itself, or of
 * the model's draft head (bn_model_info.has_draft), as long as they are likely to be right and
 * faster on this machine; but not with bn_sampler.allowed or bn_session_options.no_draft. They are
 * verified in one pass, so right ones are nearly free, and the result is bit for bit that of n
 * single steps. Writes the chosen tokens to tokens[0..*n), 1 <= *n <= most; the session then holds
 * these and no more. How many there are depends on the machine; which they are does not. The engine
 * knows no end tokens: bn_session_rewind drops those that came behind one. Fails like sample and
 * append; with BN_ERR_CONTEXT if not even one more token fits. */
BN_API bn_status bn_session_step(bn_session *session, const bn_sampler *sampler,
                                 const int32_t *draft, int32_t n_draft, int32_t *tokens,
                                 int32_t most, int32_t *n);

/* Draft tokens of the model's draft head after `token`, if that came next, sampled as in
 * bn_session_step: guesses[0..*n), *n <= most; confidences[0..*n) is the draft's probability of
 * each, given that those before are right. *n is 0 without a draft, or if the draft has not
 * followed the text, because it was scored, embedded or just rewound; a sampler that rules out all
 * tokens ends the guesses. Nothing is appended. Fails like bn_session_append, also in the draft. */
BN_API bn_status bn_session_guess(bn_session *session, const bn_sampler *sampler, int32_t token,
                                  int32_t most, int32_t *guesses, float *confidences, int32_t *n);

/* The share of one text in a pass: tokens to append, and how many to choose after them. */
typedef struct bn_entry {
    bn_session *session;
    const int32_t *tokens;     /* int32[n_tokens], n_tokens >= 1: a piece of a prompt, or */
    int32_t n_tokens;          /* the token chosen last */
    int32_t most;              /* tokens to choose; 0: none, and no logits are kept */
    float moment;              /* seconds: up to 64 entries that all choose tokens, without `draft`
                                * and `allowed`, have further passes until the least of theirs has
                                * passed, or one of them has what it asks for; 0: one pass */
    const bn_sampler *sampler; /* NULL: temperature 0. `allowed` has min(most, 1 + n_draft) rows, 1
                                * if n_tokens > 1 */
    const int32_t *draft;      /* int32[n_draft]: draft tokens for those to be chosen, used if
                                * n_tokens is 1; without any the engine may draft */
    int32_t n_draft;           /* >= 0 */
    int32_t *chosen;  /* out: int32[most], of this entry alone: threads write in parallel */
    int32_t n_chosen; /* out: how many; at least one if most > 0 and status is BN_OK */
    int32_t n_passes; /* out: in how many passes */
    bn_status status; /* out: status of this text */
} bn_entry;

/* One pass for n texts, different sessions of one model, with one read of the weights (continuous
 * batching: others may come with each call): append the tokens of each, then choose. All chosen
 * tokens but the last are appended too, as they had been drafted and verified along with the
 * others; the last one is for the next call to append. All are bit for bit what calls with one text
 * and one token give. A text that fails, such as by its sampler, is left as by bn_session_append,
 * and the others continue; returns the first status that is not BN_OK. Any other invalid argument
 * gives BN_ERR_ARGUMENT to all entries before any work. What does not fit in one turn is done in
 * several. A cancel during the call ends a piece of a prompt longer than bn_session_options.batch
 * after its current block; otherwise it takes effect at the next call. */
BN_API bn_status bn_step_batch(bn_entry *entries, int32_t n);

/* Set the seed of the sampling noise; a new session has seed 0. To continue one text in several
 * ways, fork its session and give the copies different seeds. */
BN_API void bn_session_seed(bn_session *session, uint64_t seed);

/* Stop what this session does: from any thread, at any time before it is freed. From then on
 * append, score, embed, sample, step and the batch functions fail with BN_ERR_CANCELLED before any
 * work. A running one ends after its current block of tokens, with BN_ERR_CANCELLED unless that was
 * the last. A block has bn_session_options.batch tokens; of bidirectional texts embedded together
 * up to 512, or more if a session of the model has a larger n_ctx or batch. This lasts until
 * bn_session_rewind is called, with any n that it accepts, such as the current position. What the
 * session holds can still be read. */
BN_API void bn_session_cancel(bn_session *session);

/* 1 between bn_session_cancel and bn_session_rewind, else 0. */
BN_API int32_t bn_session_cancelled(const bn_session *session);

/* cffi-end */

#ifdef __cplusplus
}
#endif
#endif
