/* The tile instructions of AMX in C, for tests on processors that have none: cc -include tests/support/emulated_tiles.h products.c
 *
 * Each function has the name of an intrinsic and does what the Operation of its instruction says in Intel's manual (SDM,
 * volume 2). TDPBF16PS: for each element, the products of the even members of all pairs are added one after the other, those
 * of the odd members likewise, then both sums, then that to the element; FMA in fp32, to nearest, ties to even, and numbers
 * below 2^-126 are zero, whatever the mode of the processor. What the processor would refuse (#UD, #GP) ends the process.
 * Time, and what GCC's intrinsics tell the compiler of memory, are not emulated.
 */
#ifndef EMULATED_TILES_H
#define EMULATED_TILES_H
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_storeconfig emulated_storeconfig
#define _tile_release emulated_release
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbf16ps emulated_dpbf16ps
#ifndef __AMX_BF16__
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#endif

enum { TILES = 8, TILE_ROWS = 16, TILE_BYTES = 64 }; /* palette 1 */

/* Of each thread; files that are linked together share it. */
typedef struct {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
  } of;
  uint8_t tile[TILES][TILE_ROWS][TILE_BYTES];
} emulated_registers;
__attribute__((weak)) __thread emulated_registers emulated;

static inline void emulated_fault(int wrong, const char *what) {
  if (!wrong) return;
  fprintf(stderr, "emulated tiles: %s\n", what);
  abort();
}
static inline void emulated_check(int tile) {
  emulated_fault(emulated.of.palette != 1, "#UD: no tiles are configured");
  emulated_fault(tile < 0 || tile >= TILES || !emulated.of.rows[tile], "#UD: this tile is not configured");
}

static inline void emulated_release(void) { memset(&emulated, 0, sizeof emulated); }

static inline void emulated_loadconfig(const void *from) {
  emulated_registers next;
  memset(&next, 0, sizeof next);
  memcpy(&next.of, from, sizeof next.of);
  emulated_fault(next.of.palette > 1, "#GP: an unknown palette");
  for (int i = 0; i < 14; i++) emulated_fault(next.of.palette && next.of.reserved[i], "#GP: a reserved byte is not 0");
  for (int i = 0; i < 16 && next.of.palette; i++) {
    emulated_fault(i >= TILES && (next.of.rows[i] || next.of.colsb[i]), "#GP: there are eight tiles");
    emulated_fault(next.of.rows[i] > TILE_ROWS || next.of.colsb[i] > TILE_BYTES, "#GP: a tile is too large");
    emulated_fault(!next.of.rows[i] != !next.of.colsb[i], "#GP: a tile has rows or columns alone");
  }
  if (!next.of.palette) memset(&next, 0, sizeof next);
  emulated = next; /* this zeroes the tiles */
}

static inline void emulated_storeconfig(void *to) { memcpy(to, &emulated.of, sizeof emulated.of); }

static inline void emulated_zero(int tile) {
  emulated_check(tile);
  memset(emulated.tile[tile], 0, sizeof emulated.tile[tile]);
}

static inline void emulated_loadd(int tile, const void *base, long stride) {
  emulated_zero(tile);
  for (int i = 0; i < emulated.of.rows[tile]; i++)
    memcpy(emulated.tile[tile][i], (const char *)base + i * stride, emulated.of.colsb[tile]);
}

static inline void emulated_stored(int tile, void *base, long stride) {
  emulated_check(tile);
  for (int i = 0; i < emulated.of.rows[tile]; i++)
    memcpy((char *)base + i * stride, emulated.tile[tile][i], emulated.of.colsb[tile]);
}

/* All elements of a row at once. noinline: or the compiler could move arithmetic across the change of mode. */
static __attribute__((noinline)) void emulated_sums(int dest, int src1, int src2) {
  const __m512i odd = _mm512_set1_epi32((int)0xffff0000);
  for (int m = 0; m < emulated.of.rows[dest]; m++) {
    __m512 sum = _mm512_loadu_ps(emulated.tile[dest][m]), of_even = _mm512_setzero_ps(), of_odd = of_even;
    for (int k = 0; k < emulated.of.colsb[src1] / 4; k++) {
      int pair;
      memcpy(&pair, emulated.tile[src1][m] + 4 * k, sizeof pair);
      const __m512i a = _mm512_set1_epi32(pair), b = _mm512_loadu_si512(emulated.tile[src2][k]);
      of_even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), of_even);
      of_odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, odd), (__m512)_mm512_and_si512(b, odd), of_odd);
    }
    float row[TILE_BYTES / 4];
    _mm512_storeu_ps(row, _mm512_add_ps(sum, _mm512_add_ps(of_even, of_odd)));
    memcpy(emulated.tile[dest][m], row, emulated.of.colsb[dest]);
  }
}

static inline void emulated_dpbf16ps(int dest, int src1, int src2) {
  emulated_check(dest), emulated_check(src1), emulated_check(src2);
  emulated_fault(dest == src1 || dest == src2 || src1 == src2, "#UD: a tile is taken twice");
  emulated_fault(emulated.of.colsb[dest] % 4 || emulated.of.colsb[src1] % 4, "#UD: half a pair");
  emulated_fault(emulated.of.colsb[dest] != emulated.of.colsb[src2], "#UD: columns of the result and of B differ");
  emulated_fault(emulated.of.colsb[src1] / 4 != emulated.of.rows[src2], "#UD: columns of A and rows of B differ");
  emulated_fault(emulated.of.rows[dest] != emulated.of.rows[src1], "#UD: rows of the result and of A differ");
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0); /* exceptions masked, to nearest, DAZ and FTZ */
  emulated_sums(dest, src1, src2);
  _mm_setcsr(before);
}
#endif
