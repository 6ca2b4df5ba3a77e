// Copies between a process's own memory and memory that a peer on this node reads.
#pragma once

#include <cstddef>

namespace adaptive {

// Like memcpy, but the stores bypass the caches. So the copy neither evicts this process's data nor
// waits for lines that another core holds, to which an ordinary store takes ten times as long if
// the cores do not share a cache. The copy is visible to other threads before any later store of
// this thread.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t size_bytes) noexcept;

// Copies by streaming if the data are too large to stay in the cache until they are read; otherwise
// by memcpy.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t size_bytes) noexcept;

// Writes the lines of a range back to memory and drops them from this core's caches, so that a
// writer on another core does not have to fetch them from here.
void flush_lines(const std::byte* start, std::size_t size_bytes) noexcept;

// "avx512", "avx2", "sse2" or "memcpy": how copy_streaming() copies on this processor.
const char* streaming_name() noexcept;

}  // namespace adaptive
