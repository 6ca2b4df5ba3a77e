// Anonymous shared memory that is there as a whole before it is used: nothing that can end a
// process with SIGBUS later, nothing that a crash leaves behind.
#pragma once

#include <cstddef>
#include <string>

#include "common/deadline.h"
#include "common/mapped_region.h"
#include "common/scoped_fd.h"

namespace adaptive {

struct Segment {
  ScopedFd fd;  // for the peer; not needed for the mapping
  MappedRegion region;
  const char* huge_pages = "none";  // "reserved", "transparent" (asked for, not promised)
};

// Makes at least `size_bytes` of zeros, every page touched. Processes that give the same
// `turn_name`, unless it is empty, do so one after the other. Where huge pages are to be had and
// `size_bytes` is some of them, the size is rounded up to them; see region.size_bytes(). Throws
// Error naming the limit where there is not enough memory, SystemError, DeadlineError.
Segment make_segment(std::size_t size_bytes, const std::string& purpose, const Deadline& deadline,
                     const Tick& tick, const std::string& turn_name = {});

// Maps what a peer made. Throws Error unless its size is `size_bytes` and cannot change any more.
MappedRegion attach_segment(const ScopedFd& fd, std::size_t size_bytes, const std::string& purpose);

}  // namespace adaptive
