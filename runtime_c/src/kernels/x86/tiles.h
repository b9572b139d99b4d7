/* SPDX-License-Identifier: MIT
 *
 * tiles.h: the eight tile registers of AMX, each up to 16 rows of 64 bytes. Their numbers are
 * constants, as in the instructions.
 *
 * With BITNET_AMX_IN_C they are emulated in plain C, so that their users can be tested on machines
 * without AMX, and sanitizers see what they read and write.
 */
#ifndef BITNET_X86_TILES_H
#define BITNET_X86_TILES_H

#include "../inline.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { TILE_REGISTERS = 8, TILE_ROWS = 16, TILE_COLUMNS = 64 /* bytes */, TILE_SIZE = 1024 };

#if !defined(BITNET_AMX_IN_C)
#include <immintrin.h>

/* Sets the rows of each tile and zeroes all tiles. Does not use _tile_loadconfig, because GCC 12
 * assumes that it reads only 8 bytes. */
INLINE void tiles_configure(const uint8_t rows[TILE_REGISTERS]) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < TILE_REGISTERS; i++)
        config.bytes[i] = TILE_COLUMNS, config.rows[i] = rows[i];
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
/* Context switches need not save the tiles any more. */
INLINE void tiles_release(void) {
    _tile_release();
}
/* GCC does not know that tile loads read memory: without this it may delete the stores they
 * read. */
#define WRITTEN __asm__ volatile("" : : : "memory")
#define tile_zero(tile) _tile_zero(tile)
/* stride: bytes from one row to the next */
#define tile_load(tile, from, stride)                                                              \
    do {                                                                                           \
        WRITTEN;                                                                                   \
        _tile_loadd(tile, from, stride);                                                           \
    } while (0)
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)
/* sum[i][j] += sum over k < 64 of a[i][k] * b[k / 4][4 j + k % 4], signed bytes */
#define tile_dot(sum, a, b) _tile_dpbssd(sum, a, b)

#else

typedef struct tile_register {
    uint8_t at[TILE_ROWS][TILE_COLUMNS];
    uint8_t rows;
} tile_register;
static _Thread_local tile_register tile_file[TILE_REGISTERS];

INLINE void tiles_configure(const uint8_t rows[TILE_REGISTERS]) {
    memset(tile_file, 0, sizeof tile_file);
    for (int i = 0; i < TILE_REGISTERS; i++)
        tile_file[i].rows = rows[i];
}
INLINE void tiles_release(void) {
    memset(tile_file, 0, sizeof tile_file);
}
INLINE void tile_zero(int i) {
    memset(tile_file[i].at, 0, TILE_SIZE);
}
INLINE void tile_load(int i, const void *from, size_t stride) {
    for (size_t r = 0; r < tile_file[i].rows; r++)
        memcpy(tile_file[i].at[r], (const uint8_t *)from + r * stride, TILE_COLUMNS);
}
INLINE void tile_store(int i, void *to, size_t stride) {
    for (size_t r = 0; r < tile_file[i].rows; r++)
        memcpy((uint8_t *)to + r * stride, tile_file[i].at[r], TILE_COLUMNS);
}
INLINE void tile_dot(int of, int left, int right) {
    tile_register *sum = tile_file + of;
    const tile_register *a = tile_file + left, *b = tile_file + right;
    if (sum->rows == 0 || a->rows != sum->rows || b->rows != TILE_ROWS) /* as the CPU does */
        __builtin_trap();
    for (size_t i = 0; i < sum->rows; i++)
        for (size_t j = 0; j < TILE_COLUMNS / 4; j++) {
            int32_t total;
            memcpy(&total, &sum->at[i][4 * j], sizeof total);
            for (size_t k = 0; k < TILE_COLUMNS; k++)
                total += (int8_t)a->at[i][k] * (int8_t)b->at[k / 4][4 * j + k % 4];
            memcpy(&sum->at[i][4 * j], &total, sizeof total);
        }
}

#endif
#endif
