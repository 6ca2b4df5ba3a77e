// Copies between a process's own memory and memory that a peer on this node reads.
#pragma once

#include <cstddef>

namespace adaptive {

// As memcpy, past the caches on the way out: it neither evicts what this process works on nor waits
// for lines that another core holds (an ordinary store to such a line takes ten times as long where
// the cores share no cache). What was copied is visible to others before any later store of this
// thread.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t size_bytes) noexcept;

// Streaming for what is too large to be still cached when it is read, memcpy below.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t size_bytes) noexcept;

// Writes the lines of a range back to memory and drops them from this core's caches, so that a
// writer on another core does not have to fetch them from here.
void flush_lines(const std::byte* start, std::size_t size_bytes) noexcept;

// "avx512", "avx2", "sse2" or "memcpy": how copy_streaming() copies on this processor.
const char* streaming_name() noexcept;

}  // namespace adaptive
