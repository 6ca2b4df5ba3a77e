/* Measures the limits of the machine that transports are compared with: copies within one process,
 * and the time to transfer a cache line, or to wake a thread, between two CPUs. copies.py compiles
 * this file at the start of a run. ctypes releases the GIL while it calls these functions. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

void copy_plain(void *to, const void *from, size_t size) { memcpy(to, from, size); }

#if defined(__x86_64__)
/* Both addresses are multiples of 64, and the size is a multiple of 256. */
#define STREAM(name, isa, vector, load, store)                                           \
  __attribute__((target(isa))) static void name(char *to, const char *from, size_t size) { \
    for (size_t at = 0; at < size; at += 4 * sizeof(vector)) {                           \
      const vector *source = (const vector *)(from + at);                                \
      vector *target = (vector *)(to + at);                                              \
      const vector a = load(source), b = load(source + 1);                               \
      const vector c = load(source + 2), d = load(source + 3);                           \
      store(target, a);                                                                  \
      store(target + 1, b);                                                              \
      store(target + 2, c);                                                              \
      store(target + 3, d);                                                              \
    }                                                                                    \
  }

STREAM(stream_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
STREAM(stream_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
STREAM(stream_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
#endif

/* Copies with stores that bypass the caches, 256 bytes at a time. On CPUs without these
 * stores, this is a plain copy. */
void copy_streaming(void *to, const void *from, size_t size) {
#if defined(__x86_64__)
  const size_t whole = ((uintptr_t)to % 64) ? 0 : size / 256 * 256;
  if (__builtin_cpu_supports("avx512f")) {
    stream_avx512(to, from, whole);
  } else if (__builtin_cpu_supports("avx2")) {
    stream_avx2(to, from, whole);
  } else {
    stream_sse2(to, from, whole);
  }
  _mm_sfence();
  memcpy((char *)to + whole, (const char *)from + whole, size - whole);
#else
  memcpy(to, from, size);
#endif
}

static double now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

#define AWAKE_NS 30000.0

struct side {
  _Atomic(uint32_t) *line;
  int cpu;
  uint32_t first;
  uint32_t rounds;
  int sleeps;
};

static int pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return sched_setaffinity(0, sizeof(set), &set);
}

static void *answer(void *argument) {
  struct side *side = argument;
  pin(side->cpu);
  for (uint32_t turn = side->first; turn < 2 * side->rounds; turn += 2) {
    uint32_t now = atomic_load_explicit(side->line, memory_order_acquire);
    while (now != turn) {
      if (side->sleeps) {
        syscall(SYS_futex, side->line, FUTEX_WAIT_PRIVATE, now, NULL, NULL, 0);
      }
      now = atomic_load_explicit(side->line, memory_order_acquire);
    }
    if (side->sleeps) {
      /* The other thread falls asleep during this time. */
      const double until = now_ns() + AWAKE_NS;
      while (now_ns() < until) {
      }
    }
    atomic_store_explicit(side->line, turn + 1, memory_order_release);
    if (side->sleeps) {
      syscall(SYS_futex, side->line, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
  }
  return NULL;
}

/* Returns the time in nanoseconds of a round trip between threads on two CPUs: of a cache line, or of
 * two wakes if the threads sleep. The result is negative if the threads cannot be started. */
double round_trip_ns(int first_cpu, int second_cpu, uint32_t rounds, int sleeps) {
  static _Alignas(256) _Atomic(uint32_t) line;
  struct side one = {&line, first_cpu, 0, rounds, sleeps};
  struct side other = {&line, second_cpu, 1, rounds, sleeps};
  pthread_t threads[2];
  atomic_store(&line, UINT32_MAX);
  if (pthread_create(&threads[0], NULL, answer, &one) != 0) {
    return -1;
  }
  if (pthread_create(&threads[1], NULL, answer, &other) != 0) {
    /* The first thread would wait forever. */
    pthread_cancel(threads[0]);
    pthread_join(threads[0], NULL);
    return -1;
  }
  const double start = now_ns();
  atomic_store(&line, 0);
  syscall(SYS_futex, &line, FUTEX_WAKE_PRIVATE, 2, NULL, NULL, 0);
  pthread_join(threads[0], NULL);
  pthread_join(threads[1], NULL);
  return (now_ns() - start) / rounds - (sleeps ? 2 * AWAKE_NS : 0);
}
