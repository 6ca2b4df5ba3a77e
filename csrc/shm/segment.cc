#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "common/error.h"
#include "shm/limits.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace adaptive {
namespace {

constexpr std::size_t kChunk = std::size_t{64} << 20;
constexpr const char* kName = "megatron-adaptive-channel";

void look_up(const Tick& tick) {
  if (tick) {
    tick();
  }
}

// A lock that is held while memory is checked and allocated, so that ranks that start together do
// not all count on the same free memory. The lock is a bound abstract socket name, so it is
// released when its holder exits. The name is random and known only to the job's processes, so that
// no other user can hold it. If the name is empty or the lock is not free in time, a process
// continues without the lock.
class AllocationTurn {
 public:
  AllocationTurn(const std::string& name, const Deadline& deadline, const Tick& tick) {
    if (name.empty()) {
      return;
    }
    socket_ = ScopedFd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    if (name.size() >= sizeof(address.sun_path)) {
      throw std::invalid_argument("the name of a turn has " + std::to_string(name.size()) +
                                  " characters");
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    const Deadline patience = deadline.at_most(std::chrono::seconds(10));
    while (socket_ && ::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 &&
           errno == EADDRINUSE && !patience.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      look_up(tick);
    }
  }

 private:
  ScopedFd socket_;
};

// Throws Error if a file of this size exceeds the limit, because creating it would raise SIGXFSZ,
// which kills the process.
void check_file_size(std::size_t size_bytes, const std::string& purpose) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      size_bytes > limit.rlim_cur) {
    throw Error(purpose + " needs " + bytes_text(size_bytes) + ", but the limit of a file, " +
                "RLIMIT_FSIZE, is " + bytes_text(limit.rlim_cur) +
                ": use fewer or smaller slots, or ulimit -f unlimited");
  }
}

std::size_t free_huge_bytes() {
  std::ifstream file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
  std::size_t pages = 0;
  return file >> pages ? pages * kHugePageBytes : 0;
}

// Reads the setting, which is the word in brackets: "always within_size advise [never] deny force".
bool transparent_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string line;
  std::getline(file, line);
  return !line.empty() && line.find("[never]") == std::string::npos &&
         line.find("[deny]") == std::string::npos;
}

// Allocates huge pages from the kernel's reserve. Returns an empty segment if there are not enough.
Segment try_reserved_huge_pages(std::size_t size_bytes) {
  const std::size_t rounded = round_up(size_bytes, kHugePageBytes);
  if (size_bytes < kHugePageBytes || free_huge_bytes() < rounded) {
    return {};
  }
  try {
    Segment segment;
    segment.fd = make_sealed_file(kName, rounded, MFD_HUGETLB | MFD_HUGE_2MB);
    if (::fallocate(segment.fd.get(), 0, 0, static_cast<off_t>(rounded)) != 0) {
      return {};
    }
    segment.region = MappedRegion::shared(segment.fd.get(), rounded);
    segment.huge_pages = "reserved";
    return segment;
  } catch (const SystemError&) {
    return {};  // other processes took the pages meanwhile, or a limit forbids them
  }
}

// Allocates every page now, with calls that report a failure. Without this, a later store to a page
// that cannot be allocated would raise SIGBUS.
void touch(const Segment& segment, const Deadline& deadline, const Tick& tick) {
  const std::size_t size_bytes = segment.region.size_bytes();
  for (std::size_t start = 0; start < size_bytes; start += kChunk) {
    const std::size_t count = std::min(kChunk, size_bytes - start);
    int result = ::madvise(segment.region.data() + start, count, MADV_POPULATE_WRITE);
    if (result != 0 && errno == EINVAL) {
      result =
          ::fallocate(segment.fd.get(), 0, static_cast<off_t>(start), static_cast<off_t>(count));
    }
    if (result != 0 && errno == EINTR) {
      start -= kChunk;  // repeats this chunk; wraps around to the same start
    } else if (result != 0) {
      throw_errno("madvise", "MADV_POPULATE_WRITE, " + std::to_string(count) + " bytes");
    }
    look_up(tick);
    if (deadline.expired()) {
      throw DeadlineError("the " + bytes_text(size_bytes) +
                          " of a channel could not be touched within the time limit");
    }
  }
}

}  // namespace

Segment make_segment(std::size_t size_bytes, const std::string& purpose, const Deadline& deadline,
                     const Tick& tick, const std::string& turn_name) {
  check_file_size(size_bytes, purpose);
  const AllocationTurn turn(turn_name, deadline, tick);
  Segment segment = try_reserved_huge_pages(size_bytes);
  if (segment.fd) {
    return segment;
  }
  check_memory(size_bytes, purpose);
  const bool transparent = size_bytes >= kHugePageBytes && transparent_huge_pages();
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t rounded = round_up(size_bytes, transparent ? kHugePageBytes : page);
  segment.fd = make_sealed_file(kName, rounded);
  segment.region = MappedRegion::untouched(segment.fd.get(), rounded);
  if (transparent && ::madvise(segment.region.data(), rounded, MADV_HUGEPAGE) == 0) {
    segment.huge_pages = "transparent";
  }
  touch(segment, deadline, tick);
  return segment;
}

MappedRegion attach_segment(const ScopedFd& fd, std::size_t size_bytes,
                            const std::string& purpose) {
  const std::size_t found = sealed_size(fd.get(), purpose);
  if (found != size_bytes) {
    throw Error(purpose + ": the peer's memory has " + std::to_string(found) + " bytes where " +
                std::to_string(size_bytes) + " were announced");
  }
  return MappedRegion::shared(fd.get(), size_bytes);
}

}  // namespace adaptive
