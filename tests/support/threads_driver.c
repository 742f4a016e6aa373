/* muonmesh_share of threads.c, called by several threads at the same time with random numbers of parts and threads, for the
 * sanitizers. A part counts itself and adds its number in the room of its thread, without a lock. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { CALLERS = 4, TIMES = 200, PARTS = 9, THREADS = 4, APART = 8 };
typedef void multiply_function(long, long, long, long, const void *, int, const float *, int, long, long, void *);
void muonmesh_share(multiply_function *, long, long, long, long, const void *, int, const float *, int, long, long, void *,
                    long);

static void part(long batch, long rows, long depth, long cols, const void *operands, int transposed, const float *factors,
                 int symmetric, long part, long parts, void *room) {
  ((long *)operands)[part]++;
  *(long *)room += part + 1;
  for (volatile int i = 0; i < 50000; i++)
    if (i % 10000 == 0) sched_yield(); /* so that helpers wake up on a busy machine too */
}

static void *call(void *seed_of) {
  unsigned seed = (unsigned)(long)seed_of;
  for (int i = 0; i < TIMES; i++) {
    long parts = rand_r(&seed) % PARTS, threads = 1 + rand_r(&seed) % THREADS, total = 0;
    long counts[PARTS] = {0}, rooms[THREADS * APART] = {0};
    muonmesh_share(part, 0, 0, 0, 0, counts, 0, 0, 0, parts, threads, rooms, APART * sizeof(long));
    for (long p = 0; p < parts; p++)
      if (counts[p] != 1) puts("a part was computed more or less than once"), exit(1);
    for (int t = 0; t < THREADS; t++) total += rooms[t * APART];
    if (total != parts * (parts + 1) / 2) puts("two threads had one room"), exit(1);
  }
  return NULL;
}

int main(void) {
  pthread_t callers[CALLERS];
  for (long i = 0; i < CALLERS; i++) pthread_create(callers + i, NULL, call, (void *)(i + 1));
  for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
  puts("fine");
}
