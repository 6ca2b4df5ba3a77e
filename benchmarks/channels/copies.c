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
/* Both addresses are multiples of 64, and so is the size. */
__attribute__((target("avx512f"))) static void stream_avx512(char *to, const char *from,
                                                             size_t size) {
  for (size_t at = 0; at < size; at += 256) {
    __m512i a = _mm512_loadu_si512(from + at);
    __m512i b = _mm512_loadu_si512(from + at + 64);
    __m512i c = _mm512_loadu_si512(from + at + 128);
    __m512i d = _mm512_loadu_si512(from + at + 192);
    _mm512_stream_si512((void *)(to + at), a);
    _mm512_stream_si512((void *)(to + at + 64), b);
    _mm512_stream_si512((void *)(to + at + 128), c);
    _mm512_stream_si512((void *)(to + at + 192), d);
  }
}

__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t size) {
  for (size_t at = 0; at < size; at += 128) {
    __m256i a = _mm256_loadu_si256((const void *)(from + at));
    __m256i b = _mm256_loadu_si256((const void *)(from + at + 32));
    __m256i c = _mm256_loadu_si256((const void *)(from + at + 64));
    __m256i d = _mm256_loadu_si256((const void *)(from + at + 96));
    _mm256_stream_si256((void *)(to + at), a);
    _mm256_stream_si256((void *)(to + at + 32), b);
    _mm256_stream_si256((void *)(to + at + 64), c);
    _mm256_stream_si256((void *)(to + at + 96), d);
  }
}

static void stream_sse2(char *to, const char *from, size_t size) {
  for (size_t at = 0; at < size; at += 64) {
    __m128i a = _mm_loadu_si128((const void *)(from + at));
    __m128i b = _mm_loadu_si128((const void *)(from + at + 16));
    __m128i c = _mm_loadu_si128((const void *)(from + at + 32));
    __m128i d = _mm_loadu_si128((const void *)(from + at + 48));
    _mm_stream_si128((void *)(to + at), a);
    _mm_stream_si128((void *)(to + at + 16), b);
    _mm_stream_si128((void *)(to + at + 32), c);
    _mm_stream_si128((void *)(to + at + 48), d);
  }
}
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
