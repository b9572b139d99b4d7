/* SPDX-License-Identifier: MIT
 *
 * common.h: what the x86 files share.
 */
#ifndef BITNET_X86_COMMON_H
#define BITNET_X86_COMMON_H

#include "../inline.h"
#include "../kernels.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

/* Of the KV cache, farther ahead than of weights, as softmax comes between keys and values; behind
 * the bytes that are read at the same time. */
INLINE void prefetch_cache(const void *p, size_t together) {
    _mm_prefetch((const char *)p + (together > 8192 ? together : 8192), _MM_HINT_T0);
}

/* The same of the next bytes of a linear stream. Registers that are used together lie in several
 * pages of memory: asked for in their order, the hardware would take them for several streams. */
INLINE void prefetch_bytes(const void *p, size_t bytes, size_t together) {
    for (size_t line = 0; line < bytes; line += 64)
        prefetch_cache((const char *)p + line, together);
}

/* What some blocks, which take turns with numbers of the same keys, ask for of the keys behind
 * these: each as much, and in the order of memory. So memory is not idle while the later ones
 * compute. */
typedef struct fetching {
    uintptr_t at;
    size_t step; /* bytes, with each step of a block */
} fetching;

INLINE fetching fetch_share(const void *keys, size_t bytes, size_t steps, size_t block,
                            size_t blocks) {
    const uintptr_t ahead = (uintptr_t)keys + bytes + 8192;
    return (fetching){ahead + bytes * block / blocks, bytes / blocks / steps};
}

INLINE void fetch_next(fetching *f) {
    const uintptr_t end = f->at + f->step;
    for (uintptr_t line = (f->at + 63) / 64 * 64; line < end; line += 64)
        _mm_prefetch((const char *)line, _MM_HINT_T0);
    f->at = end;
}

/* The last three levels of the float rule's tree. */
INLINE float tree_of_8(__m256 s) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

#endif
