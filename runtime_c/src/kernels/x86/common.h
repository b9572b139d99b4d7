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

/* What some blocks, which take turns with numbers of the same keys, ask for of the keys behind
 * these: each as much, and in the order of memory. So memory is not idle while the later ones
 * compute, and the hardware sees one stream where the registers of a step lie in several pages. */
typedef struct fetching {
    uintptr_t at;
    size_t step; /* bytes, with each step of a block */
} fetching;

INLINE fetching fetch_share(const void *from, size_t bytes, size_t steps, size_t block,
                            size_t blocks) {
    return (fetching){(uintptr_t)from + bytes * block / blocks,
                      (bytes + blocks * steps - 1) / (blocks * steps)};
}

/* To the second cache: the first waits for two dozen lines at most, which is less than memory gives
 * in the time that it takes to answer. */
INLINE void fetch_next(fetching *f) {
    const uintptr_t end = f->at + f->step;
    for (; f->at < end; f->at += 64)
        _mm_prefetch((const char *)f->at, _MM_HINT_T1);
    f->at = end;
}

/* The last three levels of the float rule's tree. */
INLINE float tree_of_8(__m256 s) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

#endif
