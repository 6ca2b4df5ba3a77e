// Functions that copy between a process's own memory and memory that a peer on this node reads.
#pragma once

#include <cstddef>

namespace adaptive {

// Like memcpy, but the stores bypass the caches. The copy therefore neither evicts this process's
// data nor waits for cache lines that another core holds. If the cores do not share a cache, an
// ordinary store to such a line takes ten times as long. The copy is visible to other threads
// before any later store of this thread.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t size_bytes) noexcept;

// Uses copy_streaming() if the data are too large to stay in the cache until they are read,
// otherwise memcpy.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t size_bytes) noexcept;

// Writes the cache lines of a range back to memory and drops them from this core's caches, so that
// a writer on another core does not have to fetch them from this core.
void flush_lines(const std::byte* start, std::size_t size_bytes) noexcept;

// Returns how copy_streaming() copies on this processor: "avx512", "avx2", "sse2" or "memcpy".
const char* streaming_name() noexcept;

}  // namespace adaptive
