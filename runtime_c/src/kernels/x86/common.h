/* SPDX-License-Identifier: MIT
 *
 * common.h: shared by the x86 files.
 */
#ifndef BITNET_X86_COMMON_H
#define BITNET_X86_COMMON_H

#include "../inline.h"
#include "../kernels.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

/* Prefetch state of one of several blocks that compute on the same keys in turn. Each block
 * prefetches an equal share of the keys that come next, in memory order, so that memory stays busy
 * during all blocks and the hardware sees one stream even if the registers of a step lie in several
 * pages. */
typedef struct fetching {
    uintptr_t at;
    size_t step; /* bytes to prefetch per step of a block */
} fetching;

INLINE fetching fetch_share(const void *from, size_t bytes, size_t steps, size_t block,
                            size_t blocks) {
    return (fetching){(uintptr_t)from + bytes * block / blocks,
                      (bytes + blocks * steps - 1) / (blocks * steps)};
}

/* Into L2: L1 allows two dozen outstanding lines at most, fewer than memory delivers within its
 * latency. */
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
