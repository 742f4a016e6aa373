/* All functions of one variant of products.c on random sizes, strides and values, each operand in memory of its exact size
 * (malloc), so that sanitizers see every element too far. Arguments: a seed, a count. Prints the largest error relative to
 * what rounding allows, and a number that all bits of all results follow from: the same for every variant and processor,
 * but for amx, which has another order of sums. The error is infinite where a call has left another configuration of tiles.
 * Without arguments it prints the variant that this processor would take, if it is linked with dispatch.c.
 * tests/numerics/test_compiled_sanitized.py and tests/package/test_arm.py build it. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AMX_TILE__)
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef struct {
  bf16 *at;
  long ld, step;
} matrix;
#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)
#define OURS(name) NAMED(name, VARIANT)
long OURS(muonmesh_room)(long, long);
void OURS(muonmesh_multiply)(long, long, long, long, const matrix[6], int, const float *, int, long, long, void *);
void OURS(muonmesh_row_products)(long, long, const bf16 *, const bf16 *, float *);
void OURS(muonmesh_transpose)(long, long, long, const bf16 *, bf16 *);
void OURS(muonmesh_load)(long, long, long, const bf16 *, bf16 *, float *);
long OURS(muonmesh_room_of_all)(long, long);
void OURS(muonmesh_orthogonalize)(long, long, long, const bf16 *, bf16 *, long, const double *, void *);

__attribute__((weak)) const char *muonmesh_variant(void);
__attribute__((weak)) const char *muonmesh_tiles(void);

enum { USUAL, ANY, TINY }; /* values: near each other; all bit patterns, NaN and inf among them; rows down to 2^-133 */
static uint64_t state, bits = 14695981039346656037u;
/* FNV-1a of what was written. A NaN is a NaN: processors choose its bits. */
static void note(const bf16 *from, long count) {
  for (long i = 0; i < count; i++) bits = (bits ^ ((from[i] & 0x7fff) > 0x7f80 ? 0x7fc0 : from[i])) * 1099511628211u;
}
static void note_floats(const float *from, long count) {
  for (long i = 0; i < count; i++) {
    uint32_t each;
    memcpy(&each, from + i, 4);
    bits = (bits ^ ((each & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : each)) * 1099511628211u;
  }
}
static uint32_t draw(void) { return (uint32_t)((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }
static long upto(long most) { return 1 + draw() % most; }
static double wide(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

/* NaN is the largest. */
static double larger(double a, double b) { return a >= b ? a : b >= a ? b : INFINITY; }

static bf16 value(int kind, int lower) {
  if (kind == ANY) return draw();
  int exponent = 120 + draw() % 8 - lower;
  return (draw() & 1) << 15 | (exponent < 0 ? 0 : exponent) << 7 | (draw() & 127);
}

/* The tiles of somebody else: none, or two. */
static const uint8_t theirs[2][64] = {{0}, {1, [16] = 32, [18] = 8, [48] = 7, [49] = 3}};
static int whose;
static void configure_theirs(void) {
  whose = draw() & 1;
#if defined(__AMX_TILE__)
  if (whose) _tile_loadconfig(theirs[1]);
  else _tile_release();
#endif
}
static double is_theirs(void) {
#if defined(__AMX_TILE__)
  uint8_t found[64];
  _tile_storeconfig(found);
  __asm__ volatile("" : : "r"(found) : "memory"); /* GCC's intrinsic says that it writes 8 bytes */
  if (memcmp(found, theirs[whose], sizeof found)) return INFINITY;
#endif
  return 0;
}

/* Rows may be apart, some a multiple of 4,096 bytes, but the last one ends with its last element. */
static matrix make(long batch, long rows, long cols, int kind) {
  matrix m = {0, draw() % 8 ? cols + draw() % 3 : (cols + 2047) / 2048 * 2048, 0};
  m.step = rows * m.ld + draw() % 3;
  long size = (batch - 1) * m.step + (rows - 1) * m.ld + cols;
  m.at = malloc(size * sizeof(bf16));
  for (long i = 0, lower = 0; i < size; i++) {
    if (i % m.ld == 0) lower = kind == TINY ? draw() % 130 : 0;
    m.at[i] = value(kind, lower);
  }
  return m;
}

static double product(int kind) {
  int symmetric = draw() & 1, transposed = draw() & 1;
  long batch = upto(3), rows = upto(90), depth = draw() % 20 ? upto(120) : 3050 + draw() % 60, parts = upto(3);
  if (draw() % 10 == 0) /* whole tiles, several groups of panels, sums that wait for the rest of their depth */
    rows = 32 * upto(10), depth = draw() % 5 ? 32 * upto(4) : 2080, batch = 1;
  long cols = symmetric ? rows : upto(rows > 90 ? 300 : 90);
  matrix m[6] = {make(batch, rows, depth, kind), transposed ? make(batch, cols, depth, kind) : make(batch, depth, cols, kind)};
  for (int n = 2; n < 6; n++)
    if (n == 4 || draw() & 1) m[n] = make(batch, rows, cols, kind);
  float factors[9];
  for (int n = 0; n < 9; n++) factors[n] = (float)draw() / (1u << 30) - 1.0f;
  long size = OURS(muonmesh_room)(rows, depth);
  configure_theirs();
  for (long part = 0; part < parts; part++) {
    void *room = NULL;
    if (posix_memalign(&room, 64, size)) exit(2);
    memset(room, 0xff, size); /* NaN everywhere */
    OURS(muonmesh_multiply)(batch, rows, depth, cols, m, transposed, factors, symmetric, part, parts, room);
    free(room);
  }
  for (int n = 4; n < 6; n++)
    if (m[n].at) note(m[n].at, (batch - 1) * m[n].step + (rows - 1) * m[n].ld + cols);
  double worst = is_theirs();
  for (long b = 0; b < batch && kind == USUAL; b++)
    for (long i = 0; i < rows; i++)
      for (long j = symmetric ? i : 0; j < cols; j++) {
        double sum = 0, size_of_all = 0;
        for (long k = 0; k < depth; k++) {
          long at = transposed ? j * m[1].ld + k : k * m[1].ld + j;
          double term = wide(m[0].at[b * m[0].step + i * m[0].ld + k]) * wide(m[1].at[b * m[1].step + at]);
          sum += term;
          size_of_all += fabs(term);
        }
        sum *= factors[3 * b], size_of_all *= fabs(factors[3 * b]);
        for (int n = 2; n < 4; n++)
          if (m[n].at) {
            double term = factors[3 * b + n - 1] * wide(m[n].at[b * m[n].step + i * m[n].ld + j]);
            sum += term, size_of_all += fabs(term);
          }
        double found = wide(m[4].at[b * m[4].step + i * m[4].ld + j]);
        /* Half a unit of bf16, and fp32 sums of as many terms. */
        double allowed = fabs(sum) / 256 + size_of_all * (double)(depth + 4) * 0x1p-23;
        worst = larger(worst, fabs(found - sum) / allowed);
        if (symmetric && memcmp(m[4].at + b * m[4].step + i * m[4].ld + j, m[4].at + b * m[4].step + j * m[4].ld + i, 2))
          worst = INFINITY;
      }
  for (int n = 0; n < 6; n++) free(m[n].at);
  return worst;
}

static double passes(int kind) {
  long batch = upto(3), rows = upto(80), cols = upto(150), count = batch * rows * cols;
  bf16 *x = malloc(count * 2), *y = malloc(count * 2), *out = malloc(count * 2);
  float *sums = malloc(batch * rows * 4), *norms = malloc(batch * 4);
  for (long i = 0, lower = 0; i < count; i++) {
    if (i % cols == 0) lower = kind == TINY ? draw() % 130 : 0;
    x[i] = value(kind, lower);
    y[i] = x[i] ^ (draw() & 0x807f);
  }
  double worst = 0;
  OURS(muonmesh_transpose)(batch, rows, cols, x, out);
  for (long i = 0; i < count; i++)
    if (x[i] != out[i / (rows * cols) * rows * cols + i % cols * rows + i % (rows * cols) / cols]) worst = INFINITY;
  OURS(muonmesh_row_products)(batch * rows, cols, x, y, sums);
  note_floats(sums, batch * rows);
  for (long i = 0; i < batch * rows && kind == USUAL; i++) {
    double sum = 0, size_of_all = 0;
    for (long j = 0; j < cols; j++) {
      double term = wide(x[i * cols + j]) * wide(y[i * cols + j]);
      sum += term, size_of_all += fabs(term);
    }
    worst = larger(worst, fabs(sums[i] - sum) / (size_of_all * (double)cols * 0x1p-23));
  }
  bf16 *loaded = draw() & 1 ? x : out;
  OURS(muonmesh_load)(batch, rows, cols, x, loaded, norms);
  note(loaded, count);
  note_floats(norms, batch);
  free(x), free(y), free(out), free(sums), free(norms);
  return worst;
}

/* Singular values of the result are near 1, so its square has about as many on its diagonal as it has rows. */
static double all_steps(int kind) {
  static const double polynomials[] = {4.0848, -6.8946, 2.9270, 3.9505, -6.3029, 2.6377, 1.5, -0.5, 0, 1.875, -1.25, 0.375};
  long batch = upto(3), rows = upto(70), cols = upto(70), count = rows * cols, steps = upto(4);
  bf16 *x = malloc(batch * count * 2), *out = malloc(batch * count * 2);
  double *numbers = malloc(steps * 3 * sizeof(double)), worst = 0;
  memcpy(numbers, polynomials, steps * 3 * sizeof(double));
  for (long i = 0; i < batch * count; i++) x[i] = value(kind, 0);
  void *room = NULL;
  if (posix_memalign(&room, 64, OURS(muonmesh_room_of_all)(rows, cols))) exit(2);
  memset(room, 0xff, OURS(muonmesh_room_of_all)(rows, cols));
  configure_theirs();
  OURS(muonmesh_orthogonalize)(batch, rows, cols, x, out, steps, numbers, room);
  worst = is_theirs();
  note(out, batch * count);
  for (long b = 0; b < batch && kind == USUAL && steps == 4; b++) {
    double sum = 0;
    for (long i = b * count; i < (b + 1) * count; i++) sum += wide(out[i]) * wide(out[i]);
    worst = larger(worst, sum / (1.5 * (rows < cols ? rows : cols)));
  }
  free(x), free(out), free(room), free(numbers);
  return worst;
}

int main(int n, char **arguments) {
  if (n == 1 && muonmesh_variant) return puts(muonmesh_variant()) < 0;
  if (n != 3) return 2;
#if defined(__AMX_TILE__)
  if (muonmesh_tiles && *muonmesh_tiles()) return 2; /* asks for the registers */
#endif
  state = strtoull(arguments[1], NULL, 10);
  double worst = 0;
  for (long i = 0, cases = atol(arguments[2]); i < cases; i++) {
    int kind = i % 4 == 3 ? ANY : i % 4 == 2 ? TINY : USUAL;
    worst = larger(worst, product(kind));
    worst = larger(worst, passes(kind));
    worst = larger(worst, all_steps(kind));
  }
  printf("%g %016llx\n", worst, (unsigned long long)bits);
  return 0;
}
