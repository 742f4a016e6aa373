/* Products of bf16 matrices on a CPU. setup.py compiles this file once for each set of instructions, -DVARIANT=name,
 * and each variant's functions end in that name.
 *
 * All variants but amx give the same bits. Every element of a result is one sum in fp32, over k in order, in pairs: first
 * the odd member of a pair, then the even one, as VDPBF16PS does. A product of two bf16 numbers is exact in fp32, so a
 * processor without that instruction gets the same bits from a fused multiply-add. amx adds 16 pairs at a time to a sum, as
 * TDPBF16PS does: the products of their even members one after the other, those of their odd ones likewise, then both sums
 * to each other. Nothing depends on how a product is cut up: not on tiles, panels, threads, nor on the other matrices of a
 * batch. Numbers below 2^-126 count as zero.
 *
 * As in Goto and van de Geijn (2008), "Anatomy of High-Performance Matrix Multiplication": a group of panels of B is
 * packed for the second-level cache, and tiles of A times a panel are summed in registers.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)
/* Two static functions, whose names say in the library which instructions they have. */
#define multiply NAMED(multiply, VARIANT)
#define multiply_configured NAMED(multiply_configured, VARIANT)
#define muonmesh_room NAMED(muonmesh_room, VARIANT)
#define muonmesh_multiply NAMED(muonmesh_multiply, VARIANT)
#define muonmesh_transpose NAMED(muonmesh_transpose, VARIANT)
#define muonmesh_row_products NAMED(muonmesh_row_products, VARIANT)
#define muonmesh_load NAMED(muonmesh_load, VARIANT)
#define muonmesh_room_of_all NAMED(muonmesh_room_of_all, VARIANT)
#define muonmesh_orthogonalize NAMED(muonmesh_orthogonalize, VARIANT)

typedef uint16_t bf16;
/* ROWS: of a tile. PANELS, DEPTH: packed at once, panels and elements of each of their columns. PAIRS: summed at once. */
#if defined(__AMX_BF16__)
enum { LANES = 16, ROWS = 32, PANELS = 8, DEPTH = 2048, PAIRS = 16 }; /* four sums, two of A, two of B in 8 registers */
#elif defined(__AVX512F__)
enum { LANES = 16, ROWS = 12, PANELS = 4, DEPTH = 3072, PAIRS = 1 }; /* 24 sums, 2 vectors of B, one of A in 32 registers */
#else
enum { LANES = 8, ROWS = 4, PANELS = 4, DEPTH = 3072, PAIRS = 1 };
#endif
typedef float floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t pairs __attribute__((vector_size(LANES * 4))); /* of bf16, the even one in the lower half */
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));

enum { VECTORS = 2, WIDTH = LANES * VECTORS }; /* of a panel */

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* VDPBF16PS and VCVTNEPS2BF16 take numbers below 2^-126 for zero whatever the mode of the processor. Other instructions
 * are told to, or rows that are far smaller than others would get other bits. `restore` undoes it. */
#if defined(__x86_64__)
INLINE uint64_t flush(void) { unsigned before = _mm_getcsr(); _mm_setcsr(before | 0x8040); return before; }
INLINE void restore(uint64_t before) { _mm_setcsr((unsigned)before); }
#else
INLINE uint64_t flush(void) {
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | 1ul << 24) : "memory");
  return before;
}
INLINE void restore(uint64_t before) { __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory"); }
#endif
#define APART __attribute__((noinline)) /* or arithmetic could be moved across the change of mode */

INLINE long least(long a, long b) { return a < b ? a : b; }

INLINE floats widen(halves h) { return (floats)(__builtin_convertvector(h, pairs) << 16); }

/* To nearest, ties to even; NaN stays NaN. */
INLINE halves narrow(floats x) {
#if defined(__AVX512BF16__)
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
  pairs bits = (pairs)x, nan = (pairs)(x != x);
  pairs rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded &= (pairs)((bits & 0x7f800000) != 0) | 0x8000; /* below 2^-126: zero, of the same sign */
  return __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40) & nan), halves);
#endif
}

/* sum + a * b of each pair. */
INLINE floats add_products(floats sum, uint32_t a, pairs b) {
#if defined(__AVX512BF16__)
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#elif defined(__AVX512F__)
  __m512i both = _mm512_set1_epi32((int)a), high = _mm512_set1_epi32((int)0xffff0000);
  __m512 odd = (__m512)_mm512_and_si512(both, high), even = (__m512)_mm512_slli_epi32(both, 16);
  sum = (floats)_mm512_fmadd_ps((__m512)(b & 0xffff0000u), odd, (__m512)sum);
  return (floats)_mm512_fmadd_ps((__m512)(b << 16), even, (__m512)sum);
#elif defined(__AVX2__)
  __m256i both = _mm256_set1_epi32((int)a), high = _mm256_set1_epi32((int)0xffff0000);
  __m256 odd = (__m256)_mm256_and_si256(both, high), even = (__m256)_mm256_slli_epi32(both, 16);
  sum = (floats)_mm256_fmadd_ps((__m256)(b & 0xffff0000u), odd, (__m256)sum);
  return (floats)_mm256_fmadd_ps((__m256)(b << 16), even, (__m256)sum);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  /* BFMLALT takes the odd ones, BFMLALB the even ones. BFDOT and BFMMLA would add the two of a pair first. */
  union { floats all; float32x4_t half[2]; } s = {sum};
  union { pairs all; bfloat16x8_t half[2]; } bs = {b};
  bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(a));
  for (int n = 0; n < 2; n++) s.half[n] = vbfmlalbq_f32(vbfmlaltq_f32(s.half[n], bs.half[n], both), bs.half[n], both);
  return s.all;
#else
  union { floats all; float32x4_t half[2]; } s = {sum}, o = {(floats)(b & 0xffff0000u)}, e = {(floats)(b << 16)};
  union { uint32_t bits; float number; } odd = {a & 0xffff0000u}, even = {a << 16};
  for (int n = 0; n < 2; n++)
    s.half[n] = vfmaq_n_f32(vfmaq_n_f32(s.half[n], o.half[n], odd.number), e.half[n], even.number);
  return s.all;
#endif
}

/* Pack a panel of B, whose element (k, j) is b[k * ld + j]: pairs of rows, one for each column. */
static void pack_rows(const bf16 *b, long ld, long depth, long width, uint32_t *packed) {
  for (long k = 0; k < depth; k += 2, packed += WIDTH) {
    const bf16 *even = b + k * ld, *odd = even + ld;
    if (width == WIDTH && k + 1 < depth)
      UNROLL for (int v = 0; v < VECTORS; v++) {
        halves low, high;
        memcpy(&low, even + v * LANES, sizeof low);
        memcpy(&high, odd + v * LANES, sizeof high);
        pairs both = __builtin_convertvector(low, pairs) | (__builtin_convertvector(high, pairs) << 16);
        memcpy(packed + v * LANES, &both, sizeof both);
      }
    else
      for (long j = 0; j < WIDTH; j++) {
        uint32_t low = j < width ? even[j] : 0, high = j < width && k + 1 < depth ? odd[j] : 0;
        packed[j] = low | high << 16;
      }
  }
}

#if defined(__AVX512F__)
INLINE void transpose_16(__m512i *r) {
  __m512i t[16];
  UNROLL for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#endif

/* Pack a panel of B, whose element (k, j) is b[j * ld + k]. */
static void pack_columns(const bf16 *b, long ld, long depth, long width, uint32_t *packed) {
  for (long j = 0; j < WIDTH; j += LANES) {
    long k = 0;
#if defined(__AVX512F__)
    if (j + LANES <= width)
      for (; k + 2 * LANES <= depth; k += 2 * LANES) {
        __m512i r[LANES];
        UNROLL for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_si512(b + (j + i) * ld + k);
        transpose_16(r);
        UNROLL for (int i = 0; i < LANES; i++) _mm512_storeu_si512(packed + (k / 2 + i) * WIDTH + j, r[i]);
      }
#endif
    for (; k < depth; k += 2)
      for (long i = j; i < j + LANES; i++) {
        uint32_t low = i < width ? b[i * ld + k] : 0, high = i < width && k + 1 < depth ? b[i * ld + k + 1] : 0;
        packed[k / 2 * WIDTH + i] = low | high << 16;
      }
  }
}

/* A batch of matrices in memory: elements from one row to the next, and from one matrix to the next. None: `at` is null. */
typedef struct {
  bf16 *at;
  long ld, step;
} matrix;

INLINE matrix part_of(matrix m, long row, long column) {
  return (matrix){m.at ? m.at + row * m.ld + column : 0, m.ld, m.step};
}

INLINE matrix one_of(matrix m, long number) { return (matrix){m.at ? m.at + number * m.step : 0, m.ld, m.step}; }

/* Of how many pairs a packed column is: zeros fill it. */
INLINE long pairs_of(long depth) { return ((depth + 1) / 2 + PAIRS - 1) / PAIRS * PAIRS; }

#if defined(__AMX_BF16__)
/* GCC's intrinsics say of no memory that they read it, and of a configuration that it has 8 bytes. So whatever is in memory
 * is there from here on, and nobody knows what `object` points to. */
#define MEMORY(object) __asm__ volatile("" : "+r"(object) : : "memory")

typedef struct { /* as LDTILECFG and STTILECFG have it; all zeros: none */
  uint8_t palette, start, reserved[14];
  uint16_t bytes_of_a_row[16];
  uint8_t rows[16];
} configuration;

/* Eight tiles of 16 rows of 64 bytes. */
static const configuration of_products = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* `before` is what the thread has: oneDNN may leave its own from one call to the next. */
INLINE void configure(configuration *before) {
  const configuration *wanted = &of_products;
  _tile_storeconfig(before);
  MEMORY(before);
  MEMORY(wanted);
  _tile_loadconfig(wanted);
}
INLINE void configure_again(configuration *before) {
  MEMORY(before);
  if (before->palette) _tile_loadconfig(before);
  else _tile_release();
}

/* How far apart the rows of a copy of A are: an odd number of lines, which spreads them over the first-level cache. */
INLINE long ld_of_copy(long depth) { return 2 * pairs_of(depth) | 32; }
INLINE long room_of_copy(long depth) { return ROWS * ld_of_copy(depth) * (long)sizeof(bf16); }

/* A as tiles can read it: whole, and with rows that are no multiple of 4,096 bytes apart, or they would take each other's
 * places in the cache. Else a copy of these rows, with zeros around them. */
INLINE matrix for_tiles(matrix a, long rows, long depth, bf16 *copy) {
  if (rows == ROWS && depth % (2 * PAIRS) == 0 && a.ld % 2048) return a;
  const long ld = ld_of_copy(depth), whole = 2 * pairs_of(depth);
  for (long i = 0; i < ROWS; i++) {
    const long copied = i < rows ? depth : 0;
    if (copied) memcpy(copy + i * ld, a.at + i * a.ld, copied * sizeof(bf16));
    memset(copy + i * ld + copied, 0, (whole - copied) * sizeof(bf16));
  }
  return (matrix){copy, ld, 0};
}

/* sums (ROWS, WIDTH) += A (ROWS, depth) times a packed panel; fresh: they are zeros, whatever is there. */
INLINE void any_tile(long rows, const bf16 *a, long ld, long depth, const uint32_t *packed, float *sums, int fresh) {
  enum { HALF = 16, OF_PANEL = WIDTH * sizeof(float) };
  const long of_a = ld * sizeof(bf16);
  MEMORY(sums);
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, OF_PANEL);
    _tile_loadd(1, sums + LANES, OF_PANEL);
    _tile_loadd(2, sums + HALF * WIDTH, OF_PANEL);
    _tile_loadd(3, sums + HALF * WIDTH + LANES, OF_PANEL);
  }
  for (long k = 0; k < depth; k += 2 * PAIRS, a += 2 * PAIRS, packed += PAIRS * WIDTH) {
    _tile_loadd(4, a, of_a);
    _tile_loadd(6, packed, OF_PANEL);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, packed + LANES, OF_PANEL);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + HALF * ld, of_a);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, OF_PANEL);
  _tile_stored(1, sums + LANES, OF_PANEL);
  _tile_stored(2, sums + HALF * WIDTH, OF_PANEL);
  _tile_stored(3, sums + HALF * WIDTH + LANES, OF_PANEL);
}

INLINE long height_of(long left) { return ROWS; }
#else
typedef struct { char none; } configuration;
INLINE void configure(configuration *before) {}
INLINE void configure_again(configuration *before) {}
INLINE long room_of_copy(long depth) { return 0; }
INLINE matrix for_tiles(matrix a, long rows, long depth, bf16 *copy) { return a; }

/* sums (rows, WIDTH) += A (rows, depth) times a packed panel. */
INLINE void tile(int rows, const bf16 *a, long ld, long depth, const uint32_t *packed, float *sums) {
  floats sum[ROWS][VECTORS];
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int v = 0; v < VECTORS; v++) memcpy(&sum[i][v], sums + i * WIDTH + v * LANES, sizeof(floats));
  /* A pointer for every three rows: one for each would be more than there are registers. */
  const bf16 *third[(ROWS + 2) / 3];
  UNROLL for (int i = 0; i < rows; i += 3) third[i / 3] = a + i * ld;
  for (long k = 0; k + 1 < depth; k += 2, packed += WIDTH) {
    pairs b[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) memcpy(&b[v], packed + v * LANES, sizeof(pairs));
    UNROLL for (int i = 0; i < rows; i++) {
      uint32_t both;
      memcpy(&both, third[i / 3] + i % 3 * ld, sizeof both);
      UNROLL for (int v = 0; v < VECTORS; v++) sum[i][v] = add_products(sum[i][v], both, b[v]);
    }
    UNROLL for (int i = 0; i < rows; i += 3) {
      third[i / 3] += 2;
      __asm__("" : "+r"(third[i / 3])); /* else the compiler computes one from the other, and moves them about */
    }
  }
  if (depth & 1) {
    pairs b[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) memcpy(&b[v], packed + v * LANES, sizeof(pairs));
    UNROLL for (int i = 0; i < rows; i++)
      UNROLL for (int v = 0; v < VECTORS; v++) sum[i][v] = add_products(sum[i][v], a[i * ld + depth - 1], b[v]);
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int v = 0; v < VECTORS; v++) memcpy(sums + i * WIDTH + v * LANES, &sum[i][v], sizeof(floats));
}

/* The same of any number of rows; fresh: sums are zeros, whatever is there. */
static void any_tile(long rows, const bf16 *a, long ld, long depth, const uint32_t *packed, float *sums, int fresh) {
  if (fresh) memset(sums, 0, rows * WIDTH * sizeof(float));
  if (rows == ROWS) {
    tile(ROWS, a, ld, depth, packed, sums);
    return;
  }
#if defined(__AVX512F__)
  if (rows == 8) {
    tile(8, a, ld, depth, packed, sums);
    return;
  }
#endif
  for (; rows >= 4; rows -= 4, a += 4 * ld, sums += 4 * WIDTH) tile(4, a, ld, depth, packed, sums);
  for (; rows; rows--, a += ld, sums += WIDTH) tile(1, a, ld, depth, packed, sums);
}

/* Of how many rows the next tile is: 8 and 8 rather than 12 and 4, which would leave sums waiting for each other. */
INLINE long height_of(long left) {
  if (ROWS == 12 && left != 12 && left >= 8 && left < 20) return 8;
  return least(ROWS, left);
}
#endif

INLINE floats load_widened(const bf16 *from, long count) {
  halves h = {0};
  if (count == LANES) memcpy(&h, from, sizeof h);
  else memcpy(&h, from, count * sizeof(bf16));
  return widen(h);
}

INLINE halves store_narrowed(floats x, bf16 *to, long count) {
  halves h = narrow(x);
  if (count == LANES) memcpy(to, &h, sizeof h);
  else memcpy(to, &h, count * sizeof(bf16));
  return h;
}

/* out = alpha * sums + beta * C + gamma * D, rounded once; low: what rounding leaves. */
INLINE void finish(const float *sums, long rows, long width, float alpha, float beta, matrix c, float gamma, matrix d,
                   matrix out, matrix low) {
  for (long i = 0; i < rows; i++, sums += WIDTH)
    for (long j = 0; j < width; j += LANES) {
      long lanes = least(LANES, width - j);
      floats x;
      memcpy(&x, sums + j, sizeof x);
      x *= alpha;
      if (c.at) x += load_widened(c.at + i * c.ld + j, lanes) * beta;
      if (d.at) x += load_widened(d.at + i * d.ld + j, lanes) * gamma;
      halves rounded = store_narrowed(x, out.at + i * out.ld + j, lanes);
      if (low.at) store_narrowed(x - widen(rounded), low.at + i * low.ld + j, lanes);
    }
}

INLINE void transpose_8(const bf16 *from, long ldf, bf16 *to, long ldt) {
#if defined(__x86_64__)
  __m128i r[8], t[8];
  UNROLL for (int i = 0; i < 8; i++) r[i] = _mm_loadu_si128((const __m128i *)(from + i * ldf));
  UNROLL for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm_unpacklo_epi32(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm_unpackhi_epi32(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm_unpacklo_epi32(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm_unpackhi_epi32(t[4 * i + 1], t[4 * i + 3]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm_unpacklo_epi64(r[i], r[i + 4]);
    t[2 * i + 1] = _mm_unpackhi_epi64(r[i], r[i + 4]);
  }
  UNROLL for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i *)(to + i * ldt), t[i]);
#else
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) to[j * ldt + i] = from[i * ldf + j];
#endif
}

/* Mirror columns [first, last) of the upper triangle of a square. */
static void mirror(bf16 *out, long ld, long first, long last) {
  for (long j = first; j < last; j += 8)
    for (long i = 0; i < last && i < j + 8; i += 8) {
      if (i + 8 <= j && j + 8 <= last) {
        transpose_8(out + i * ld + j, ld, out + j * ld + i, ld);
        continue;
      }
      for (long row = i; row < least(i + 8, last); row++)
        for (long column = j > row ? j : row + 1; column < least(j + 8, last); column++)
          out[column * ld + row] = out[row * ld + column];
    }
}

/* One of `parts` parts of the columns of one product; see muonmesh_multiply. */
static APART void multiply(long rows, long depth, long cols, matrix a, matrix b, int transposed, matrix c, matrix d,
                           matrix out, matrix low, const float *factors, int symmetric, long part, long parts,
                           uint32_t *packed, float *sums, bf16 *copy) {
  /* Few panels at once where parts would else get too unequal shares of a triangle. */
  const long panels = parts > 1 && cols < 3 * parts * PANELS * WIDTH ? 4 : PANELS;
  const long group_width = panels * WIDTH, panel_size = pairs_of(least(depth, DEPTH)) * WIDTH;
  for (long start = 0, number = 0; start < cols; start += group_width, number++) {
    /* A column of a symmetric result is the longer, the further to the right it is; so dealt out to and fro. */
    long turn = number % (2 * parts);
    if (turn != part && turn != 2 * parts - 1 - part) continue;
    long stop = least(start + group_width, cols), above = symmetric ? least(stop, rows) : rows;
    for (long k = 0; k < depth; k += DEPTH) {
      long chunk = least(DEPTH, depth - k), written = (chunk + 1) / 2 * WIDTH;
      for (long j = start, p = 0; j < stop; j += WIDTH, p++) {
        (transposed ? pack_columns : pack_rows)(transposed ? b.at + j * b.ld + k : b.at + k * b.ld + j, b.ld, chunk,
                                                least(WIDTH, stop - j), packed + p * panel_size);
        memset(packed + p * panel_size + written, 0, (pairs_of(chunk) * WIDTH - written) * sizeof(uint32_t));
      }
      /* No row below the last column of a symmetric result: another part mirrors to there. */
      for (long i = 0, height; i < above; i += height) {
        height = height_of(above - i);
        long inside = least(height, above - i);
        matrix rows_of_a = for_tiles(part_of(a, i, k), inside, chunk, copy);
        for (long j = start, p = 0; j < stop; j += WIDTH, p++) {
          long width = least(WIDTH, stop - j);
          if (symmetric && i >= j + width) continue;
          float *of_tile = sums + (depth > DEPTH ? i * group_width + p * height * WIDTH : 0);
          any_tile(height, rows_of_a.at, rows_of_a.ld, chunk, packed + p * panel_size, of_tile, k == 0);
          if (k + chunk == depth)
            finish(of_tile, inside, width, factors[0], factors[1], part_of(c, i, j), factors[2], part_of(d, i, j),
                   part_of(out, i, j), part_of(low, i, j));
        }
      }
    }
    if (symmetric) mirror(out.at, out.ld, start, stop);
    if (symmetric && low.at) mirror(low.at, low.ld, start, stop);
  }
}

INLINE long room_of_packed(long depth) { return PANELS * pairs_of(least(depth, DEPTH)) * WIDTH * (long)sizeof(uint32_t); }
INLINE long room_of_sums(long rows, long depth) {
  return (depth > DEPTH ? (rows + ROWS - 1) * PANELS : ROWS) * WIDTH * (long)sizeof(float);
}

/* How many bytes of memory a product needs, aligned to 64. */
long muonmesh_room(long rows, long depth) {
  return room_of_packed(depth) + room_of_sums(rows, depth) + room_of_copy(least(depth, DEPTH));
}

/* muonmesh_multiply where tiles are configured. */
static void multiply_configured(long batch, long rows, long depth, long cols, const matrix operands[6], int transposed,
                                const float *factors, int symmetric, long part, long parts, void *room) {
  float *sums = (float *)((char *)room + room_of_packed(depth));
  bf16 *copy = (bf16 *)((char *)sums + room_of_sums(rows, depth));
  uint64_t mode = flush();
  for (long i = 0; i < batch; i++) {
    matrix m[6];
    for (int n = 0; n < 6; n++) m[n] = one_of(operands[n], i);
    multiply(rows, depth, cols, m[0], m[1], transposed, m[2], m[3], m[4], m[5], factors + 3 * i, symmetric, part, parts,
             room, sums, copy);
  }
  restore(mode);
}

/* out = alpha * A B + beta * C + gamma * D, rounded once, of each of `batch` matrices.
 *
 * A is (rows, depth), B (depth, cols), or its transpose (cols, depth); C, D, out and low are (rows, cols), each with its
 * strides. C, D and low may be null; out may be C or D, but not A or B. low is what rounding leaves, rounded to bf16. Of a
 * symmetric result the upper triangle is computed and mirrored. factors has alpha, beta and gamma for each matrix.
 * This call computes the columns of one of `parts` parts; calls for different parts may run at the same time, each
 * with `room` of its own.
 */
void muonmesh_multiply(long batch, long rows, long depth, long cols, const matrix operands[6], int transposed,
                       const float *factors, int symmetric, long part, long parts, void *room) {
  configuration before;
  configure(&before);
  multiply_configured(batch, rows, depth, cols, operands, transposed, factors, symmetric, part, parts, room);
  configure_again(&before);
}

/* out (cols, rows) = the transpose of each of `batch` matrices (rows, cols). */
void muonmesh_transpose(long batch, long rows, long cols, const bf16 *from, bf16 *out) {
  enum { BLOCK = 64 }; /* as much of both as the first-level cache holds */
  for (long number = 0; number < batch; number++, from += rows * cols, out += rows * cols)
    for (long top = 0; top < rows; top += BLOCK)
      for (long left = 0; left < cols; left += BLOCK) {
        long bottom = least(top + BLOCK, rows), right = least(left + BLOCK, cols);
        for (long i = top; i < bottom; i += 8)
          for (long j = left; j < right; j += 8) {
            if (i + 8 <= bottom && j + 8 <= right) {
              transpose_8(from + i * cols + j, cols, out + j * rows + i, rows);
              continue;
            }
            for (long row = i; row < least(i + 8, bottom); row++)
              for (long column = j; column < least(j + 8, right); column++)
                out[column * rows + row] = from[row * cols + column];
          }
      }
}

/* The sum of x[j] * y[j], as sixteen sums in fp32 that are added at the end. */
static APART float dot(const bf16 *x, const bf16 *y, long count) {
  enum { SUMS = 16, TAKEN = SUMS / LANES };
  floats sum[TAKEN] = {0};
  float sums[SUMS];
  long j = 0;
  for (; j + SUMS <= count; j += SUMS)
    UNROLL for (int v = 0; v < TAKEN; v++)
      sum[v] += load_widened(x + j + v * LANES, LANES) * load_widened(y + j + v * LANES, LANES);
  memcpy(sums, sum, sizeof sums);
  for (int i = 0; j < count; i++, j++) {
    union { uint32_t bits; float number; } a = {(uint32_t)x[j] << 16}, b = {(uint32_t)y[j] << 16};
    sums[i] += a.number * b.number;
  }
  for (int half = SUMS / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  return sums[0];
}

/* out[i] = the sum of X * Y over row i. */
void muonmesh_row_products(long rows, long cols, const bf16 *x, const bf16 *y, float *out) {
  uint64_t mode = flush();
  for (long i = 0; i < rows; i++) out[i] = dot(x + i * cols, y + i * cols, cols);
  restore(mode);
}

/* out = X times a power of two that brings its largest element near 1, of `batch` matrices (rows, cols).
 *
 * out may be X. norms[i] is the Frobenius norm of what was written, 1 for zeros, NaN where an element is not finite.
 */
void muonmesh_load(long batch, long rows, long cols, const bf16 *x, bf16 *out, float *norms) {
  const long count = rows * cols;
  for (long number = 0; number < batch; number++, x += count, out += count) {
    uint16_t largest = 0;
    for (long j = 0; j < count; j++) {
      uint16_t magnitude = x[j] & 0x7fff;
      largest = magnitude > largest ? magnitude : largest;
    }
    /* 2^-(e + 1) for a largest element of 2^e to 2^(e + 1), as far as that is a normal number. */
    int exponent = largest >> 7, scale = exponent < 1 ? 252 : exponent > 251 ? 2 : 253 - exponent;
    union { uint32_t bits; float number; } power = {(uint32_t)scale << 23};
    double total = 0;
    for (long i = 0; i < rows; i++) {
      for (long j = i * cols; j < (i + 1) * cols; j += LANES) {
        long lanes = least(LANES, (i + 1) * cols - j);
        store_narrowed(load_widened(x + j, lanes) * power.number, out + j, lanes);
      }
      uint64_t mode = flush(); /* not before: what load reads may be below 2^-126, and is not zero */
      total += dot(out + i * cols, out + i * cols, cols);
      restore(mode);
    }
    norms[number] = exponent == 255 ? __builtin_nanf("") : total > 0 ? (float)__builtin_sqrt(total) : 1.0f;
  }
}

/* How many bytes of memory all steps of a matrix need, aligned to 64: for a product, two squares and two matrices. */
long muonmesh_room_of_all(long rows, long cols) {
  const long n = least(rows, cols);
  return muonmesh_room(n, rows + cols - n) + 2 * (n * n + rows * cols) * (long)sizeof(bf16);
}

/* out = the orthogonal factor of each of `batch` matrices (rows, cols): all steps of the standard iteration of Newton and
 * Schulz, three coefficients a step. With A = X X^T, X <- a X + (b A + c A^2) X, where X is divided by its norm in the first
 * factor and in the last product. These are the operations of numerics/iteration.py in the same order, so the bits are the
 * same. A step without c has no square of A.
 */
void muonmesh_orthogonalize(long batch, long rows, long cols, const bf16 *x, bf16 *out, long steps,
                            const double *coefficients, void *room) {
  const long n = least(rows, cols), wide = rows + cols - n, count = rows * cols;
  bf16 *at = (bf16 *)((char *)room + muonmesh_room(n, wide));
  const matrix none = {0, 0, 0}, a = {at, n, 0}, b = {at + n * n, n, 0};
  configuration before;
  configure(&before); /* once: it takes as long as a product of tiny matrices */
  for (long number = 0; number < batch; number++, x += count, out += count) {
    matrix iterate = {at + 2 * n * n, wide, 0}, next = {iterate.at + count, wide, 0};
    float norm;
    if (rows > cols) muonmesh_transpose(1, rows, cols, x, iterate.at);
    muonmesh_load(1, n, wide, rows > cols ? iterate.at : x, iterate.at, &norm);
    const float inverse = 1.0f / norm;
    for (long step = 0; step < steps; step++) {
      const double *of = coefficients + 3 * step, last = step == steps - 1 ? (double)inverse : 1.0;
      const float gram[] = {inverse * inverse, 0, 0}, square[] = {(float)of[2], (float)of[1], 0};
      const float apply[] = {(float)last, (float)(last * of[0]), 0};
      multiply_configured(1, n, wide, n, (matrix[]){iterate, iterate, none, none, a, none}, 1, gram, 1, 0, 1, room);
      if (of[2] != 0)
        multiply_configured(1, n, n, n, (matrix[]){a, a, of[1] != 0 ? a : none, none, b, none}, 0, square, 1, 0, 1, room);
      else
        for (long i = 0; i < n * n; i += LANES) {
          long lanes = least(LANES, n * n - i);
          store_narrowed(load_widened(a.at + i, lanes) * square[1], b.at + i, lanes);
        }
      if (step == steps - 1 && rows <= cols) next.at = out;
      multiply_configured(1, n, n, wide, (matrix[]){b, iterate, of[0] != 0 ? iterate : none, none, next, none}, 0, apply,
                          0, 0, 1, room);
      matrix previous = iterate;
      iterate = next, next = previous;
    }
    if (rows > cols) muonmesh_transpose(1, n, wide, iterate.at, out);
  }
  configure_again(&before);
}
