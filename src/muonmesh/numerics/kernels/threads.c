/* Threads that share one product of products.c.
 *
 * The caller and its helpers claim parts of the product one after the other, so a helper that the scheduler gives no core
 * claims none, and the caller does its work. The caller waits only for parts that helpers have claimed. Helpers that have
 * nothing to do sleep. No bit depends on who computes a part.
 */
#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#include <stddef.h>

typedef void multiply_function(long batch, long rows, long depth, long cols, const void *operands, int transposed,
                               const float *factors, int symmetric, long part, long parts, void *room);

typedef struct job {
  multiply_function *multiply;
  long batch, rows, depth, cols;
  const void *operands;
  int transposed;
  const float *factors;
  int symmetric;
  long parts, claimed, running, helpers, joined; /* running: parts that helpers have claimed and not ended */
  char *room;                                    /* of the caller, then of each helper */
  long apart;
  pthread_cond_t ended;
  struct job *next;
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER;
static job *jobs;    /* with parts that nobody has claimed */
static long started; /* helpers of this process */

/* The columns of a symmetric result are the longer, the further to the right they are, and the longest go first. */
static void compute(job *j, long claim, long number) {
  j->multiply(j->batch, j->rows, j->depth, j->cols, j->operands, j->transposed, j->factors, j->symmetric,
              j->parts - 1 - claim, j->parts, j->room + number * j->apart);
}

static void *help(void *unused) {
  pthread_mutex_lock(&lock);
  for (;;) {
    job *j = jobs;
    while (j && (j->claimed == j->parts || j->joined == j->helpers)) j = j->next;
    if (!j) {
      pthread_cond_wait(&posted, &lock);
      continue;
    }
    long number = ++j->joined;
    while (j->claimed < j->parts) {
      long claim = j->claimed++;
      j->running++;
      pthread_mutex_unlock(&lock);
      compute(j, claim, number);
      pthread_mutex_lock(&lock);
      if (!--j->running) pthread_cond_signal(&j->ended);
    }
  }
  return unused;
}

/* A forked process has none of the helpers, and another thread may have held the lock. */
static void forked(void) {
  lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  posted = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  jobs = NULL, started = 0;
}

static void start(long helpers) {
  static int once;
  if (!once) once = 1, pthread_atfork(NULL, NULL, forked);
  for (; started < helpers; started++) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all); /* signals are for the threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, help, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) return; /* the caller and the others do the work */
    pthread_detach(thread);
  }
}

/* muonmesh_multiply on up to `threads` threads; `room` has `apart` bytes for each of them. */
void muonmesh_share(multiply_function *multiply, long batch, long rows, long depth, long cols, const void *operands,
                    int transposed, const float *factors, int symmetric, long parts, long threads, void *room,
                    long apart) {
  job mine = {multiply, batch, rows, depth, cols, operands, transposed, factors, symmetric, parts, 0, 0, threads - 1, 0,
              room, apart, PTHREAD_COND_INITIALIZER, NULL};
  pthread_mutex_lock(&lock);
  start(threads - 1);
  mine.next = jobs, jobs = &mine;
  for (long i = 1; i < threads && i < parts; i++) pthread_cond_signal(&posted);
  while (mine.claimed < parts) {
    long claim = mine.claimed++;
    pthread_mutex_unlock(&lock);
    compute(&mine, claim, 0);
    pthread_mutex_lock(&lock);
  }
  job **at = &jobs;
  while (*at != &mine) at = &(*at)->next;
  *at = mine.next;
  while (mine.running) pthread_cond_wait(&mine.ended, &lock);
  pthread_mutex_unlock(&lock);
  pthread_cond_destroy(&mine.ended);
}
#endif
