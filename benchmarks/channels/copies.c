/* What the benchmark of the transports compares with and needs from the machine itself: copies of
 * one process, a read of all bytes, a clock, and the distance of two processors. Compiled when it is needed,
 * see copies.py; called through ctypes, which leaves the GIL. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Counts at a steady rate, and is no system call even where all clocks are. */
uint64_t cycles(void) {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#endif
}

void copy_plain(void *to, const void *from, size_t size) { memcpy(to, from, size); }

#if defined(__x86_64__)
/* Both addresses are multiples of 64, and the size is one of 256. */
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

/* A copy that leaves `to` out of the caches, 256 bytes at a time; a plain one where there are no
 * such stores. */
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

/* What stands for the operators of a model is as wide as these are where it runs. */
#if defined(__x86_64__) && defined(__gnu_linux__)
#define AS_WIDE_AS_HERE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define AS_WIDE_AS_HERE
#endif

/* Reads everything; the result keeps the compiler from leaving that out. */
AS_WIDE_AS_HERE uint64_t read_all(const void *from, size_t size) {
  const uint64_t *words = from;
  uint64_t sums[8] = {0};
  size_t at = 0;
  for (; at + 8 <= size / 8; at += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      sums[lane] += words[at + lane];
    }
  }
  for (int lane = 1; lane < 8; ++lane) {
    sums[0] += sums[lane];
  }
  return sums[0];
}

/* Writes everything with plain stores, as a kernel that computes does: the values differ, else the
 * compiler would make it a memset, which has stores of its own choice for large sizes. */
AS_WIDE_AS_HERE void write_all(void *to, size_t size, uint64_t seed) {
  uint64_t *words = to;
  for (size_t at = 0; at < size / 8; ++at) {
    words[at] = seed + at;
  }
}

static double now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

struct side {
  _Atomic(uint32_t) *line;
  int cpu;
  uint32_t first;
  uint32_t rounds;
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
    while (atomic_load_explicit(side->line, memory_order_acquire) != turn) {
    }
    atomic_store_explicit(side->line, turn + 1, memory_order_release);
  }
  return NULL;
}

/* Nanoseconds that a cache line takes there and back between two processors; negative where the
 * threads cannot be started. */
double cache_line_ns(int first_cpu, int second_cpu, uint32_t rounds) {
  static _Alignas(256) _Atomic(uint32_t) line;
  struct side one = {&line, first_cpu, 0, rounds}, other = {&line, second_cpu, 1, rounds};
  pthread_t threads[2];
  atomic_store(&line, UINT32_MAX);
  if (pthread_create(&threads[0], NULL, answer, &one) != 0) {
    return -1;
  }
  if (pthread_create(&threads[1], NULL, answer, &other) != 0) {
    /* The first would wait for ever. */
    pthread_cancel(threads[0]);
    pthread_join(threads[0], NULL);
    return -1;
  }
  const double start = now_ns();
  atomic_store(&line, 0);
  pthread_join(threads[0], NULL);
  pthread_join(threads[1], NULL);
  return (now_ns() - start) / rounds;
}
