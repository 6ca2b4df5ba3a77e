#include "common/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace adaptive {
namespace {

constexpr std::size_t kLine = 64;
// Copies of this size and above do not stay in the caches, so their reader fetches them from memory
// anyway.
constexpr std::size_t kStreamFromBytes = std::size_t{512} << 10;

// Copies whole lines to an aligned address.
using CopyLines = void (*)(std::byte* to, const std::byte* from, std::size_t lines) noexcept;

struct Method {
  const char* name;
  CopyLines copy_lines;
};

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void copy_lines_avx512(std::byte* to, const std::byte* from,
                                                          std::size_t lines) noexcept {
  for (; lines >= 4; lines -= 4, to += 4 * kLine, from += 4 * kLine) {
    const __m512i a = _mm512_loadu_si512(from);
    const __m512i b = _mm512_loadu_si512(from + kLine);
    const __m512i c = _mm512_loadu_si512(from + 2 * kLine);
    const __m512i d = _mm512_loadu_si512(from + 3 * kLine);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + kLine), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 2 * kLine), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 3 * kLine), d);
  }
  for (; lines > 0; --lines, to += kLine, from += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
}

__attribute__((target("avx2"))) void copy_lines_avx2(std::byte* to, const std::byte* from,
                                                     std::size_t lines) noexcept {
  for (; lines > 0; --lines, to += kLine, from += kLine) {
    const auto* source = reinterpret_cast<const __m256i*>(from);
    const __m256i a = _mm256_loadu_si256(source);
    const __m256i b = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, b);
  }
}

void copy_lines_sse2(std::byte* to, const std::byte* from, std::size_t lines) noexcept {
  for (; lines > 0; --lines, to += kLine, from += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

__attribute__((target("clflushopt"))) void flush_weakly(const std::byte* line,
                                                        const std::byte* end) noexcept {
  for (; line < end; line += kLine) {
    _mm_clflushopt(const_cast<std::byte*>(line));
  }
}

// Not every compiler's __builtin_cpu_supports() knows this name.
bool has_clflushopt() noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & bit_CLFLUSHOPT) != 0;
}

Method choose() noexcept {
  if (__builtin_cpu_supports("avx512f")) {
    return {"avx512", &copy_lines_avx512};
  }
  if (__builtin_cpu_supports("avx2")) {
    return {"avx2", &copy_lines_avx2};
  }
  return {"sse2", &copy_lines_sse2};
}

void fence_stores() noexcept {
  _mm_sfence();  // weaker fences do not order streaming stores
}

#else

void copy_lines_plainly(std::byte* to, const std::byte* from, std::size_t lines) noexcept {
  std::memcpy(to, from, lines * kLine);
}

Method choose() noexcept {
  return {"memcpy", &copy_lines_plainly};
}

void fence_stores() noexcept {}

#endif

const Method& method() noexcept {
  static const Method chosen = choose();
  return chosen;
}

}  // namespace

void copy_streaming(std::byte* to, const std::byte* from, std::size_t size_bytes) noexcept {
  if (size_bytes == 0) {
    return;
  }
  const std::size_t behind = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t head = std::min(behind == 0 ? 0 : kLine - behind, size_bytes);
  std::memcpy(to, from, head);
  const std::size_t lines = (size_bytes - head) / kLine;
  method().copy_lines(to + head, from + head, lines);
  const std::size_t done = head + lines * kLine;
  std::memcpy(to + done, from + done, size_bytes - done);
  fence_stores();
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t size_bytes) noexcept {
  if (size_bytes >= kStreamFromBytes) {
    copy_streaming(to, from, size_bytes);
  } else if (size_bytes != 0) {
    std::memcpy(to, from, size_bytes);
  }
}

void flush_lines(const std::byte* start, std::size_t size_bytes) noexcept {
#if defined(__x86_64__)
  static const bool supported = has_clflushopt();
  if (!supported || size_bytes == 0) {
    return;
  }
  const std::size_t behind = reinterpret_cast<std::uintptr_t>(start) % kLine;
  flush_weakly(start - behind, start + size_bytes);
  fence_stores();
#else
  (void)start;
  (void)size_bytes;
#endif
}

const char* streaming_name() noexcept {
  return method().name;
}

}  // namespace adaptive
