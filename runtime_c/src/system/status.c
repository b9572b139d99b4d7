/* SPDX-License-Identifier: MIT
 *
 * status.c: the text of each status, details of errors, and the version.
 */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

const char *bn_version(void) {
    return "0.1.0";
}

const char *bn_status_text(bn_status status) {
    switch (status) { /* no default: the compiler warns about a missing status */
    case BN_OK:
        return "success";
    case BN_ERR_ARGUMENT:
        return "an argument is null or out of its range";
    case BN_ERR_MEMORY:
        return "not enough memory";
    case BN_ERR_IO:
        return "the file could not be opened or read";
    case BN_ERR_NOT_REGULAR:
        return "not a regular file";
    case BN_ERR_MAGIC:
        return "not a packed model file";
    case BN_ERR_VERSION:
        return "the file needs another version of this library";
    case BN_ERR_TRUNCATED:
        return "the file is shorter than its header says";
    case BN_ERR_TRAILING:
        return "the file is longer than its header says";
    case BN_ERR_CHECKSUM:
        return "a checksum does not match: the file was damaged after it was written";
    case BN_ERR_SECTION:
        return "the table of sections is invalid";
    case BN_ERR_CONFIG:
        return "the model's configuration is invalid";
    case BN_ERR_UNSUPPORTED:
        return "the model's configuration is valid, but this engine cannot run it yet";
    case BN_ERR_TENSOR:
        return "the table of tensors does not match the model's configuration";
    case BN_ERR_SCALE:
        return "a stored float is not finite or out of range, or a scale is not positive";
    case BN_ERR_CODE:
        return "a stored weight code is invalid";
    case BN_ERR_CONTEXT:
        return "more tokens than the session's context holds";
    case BN_ERR_TOKEN:
        return "a token id outside the vocabulary";
    case BN_ERR_STATE:
        return "called in the wrong order: no logits yet, embed after the tokens of another call, "
               "or only a part of a text that must be given or removed as a whole";
    case BN_ERR_CANCELLED:
        return "the session was cancelled, and not rewound since, or the call was stopped";
    case BN_ERR_NUMERIC:
        return "the logits, the given vectors or pixels, or values computed from them are not "
               "finite numbers, or every token is ruled out";
    case BN_ERR_THREAD:
        return "a worker thread could not be started";
    case BN_ERR_NO_HEAD:
        return "the model has no head and so no logits: it turns a text into a vector";
    case BN_ERR_NO_TABLE:
        return "the model has no embedding of tokens: it takes vectors in their place";
    case BN_ERR_MASK:
        return "not possible with the model's mask: a bidirectional text has no next token, and "
               "only a prefix model takes a prefix";
    case BN_ERR_CACHE:
        return "the texts of the model leave no room in its cache: end one, or open the model with "
               "more cache_bytes";
    case BN_ERR_MODEL:
        return "a file of another kind, or of another model";
    case BN_ERR_INPUT:
        return "the model does not take that: it has no part for images, or only one for images";
    }
    return "unknown status";
}

bn_status bn_fail(char *detail, bn_status status, const char *format, ...) {
    if (detail != NULL) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(detail, BN_DETAIL_SIZE, format, arguments);
        va_end(arguments);
    }
    return status;
}
