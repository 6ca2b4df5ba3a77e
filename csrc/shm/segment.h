// Anonymous shared memory. It is fully allocated before it is used, so that no later access raises
// SIGBUS. Because it is anonymous, a crash leaves no files.
#pragma once

#include <cstddef>
#include <string>

#include "common/deadline.h"
#include "common/mapped_region.h"
#include "common/scoped_fd.h"

namespace adaptive {

struct Segment {
  ScopedFd fd;  // passed to the peer; not needed for the mapping
  MappedRegion region;
  const char* huge_pages = "none";  // "reserved", "transparent" (requested, not guaranteed)
};

// Allocates at least `size_bytes` of zeros and touches every page. Processes with the same
// non-empty `turn_name` allocate one after another. If huge pages are available and `size_bytes` is
// large enough, the size is rounded up to huge pages; see region.size_bytes(). If there is not
// enough memory, throws Error with the limit that was exceeded. Also throws SystemError and
// DeadlineError.
Segment make_segment(std::size_t size_bytes, const std::string& purpose, const Deadline& deadline,
                     const Tick& tick, const std::string& turn_name = {});

// Maps memory from a peer. Throws Error unless its size is sealed and equals `size_bytes`.
MappedRegion attach_segment(const ScopedFd& fd, std::size_t size_bytes, const std::string& purpose);

}  // namespace adaptive
