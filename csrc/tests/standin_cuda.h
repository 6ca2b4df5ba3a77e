// The state of the stand-in CUDA driver: clocks, memory and events that processes share. The
// library is implemented in standin_cuda.cc, whose first comment describes its purpose.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "common/mapped_region.h"
#include "common/scoped_fd.h"

namespace standin {

using adaptive::MappedRegion;
using adaptive::ScopedFd;

constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kMagic = 0x5354'414E'4449'4E31ULL;

[[noreturn]] inline void misuse(const std::string& what) {
  std::fprintf(stderr, "stand-in CUDA driver, process %d: %s\n", ::getpid(), what.c_str());
  std::fflush(stderr);
  std::abort();
}

// A vector clock: the work of each stream of each process that the clock's owner knows to be
// finished. Work that no event orders is considered simultaneous, even if it did not run
// simultaneously.
struct Clock {
  struct Part {
    std::uint64_t stream = 0;
    std::uint64_t time = 0;
  };
  std::array<Part, 96> parts{};

  std::uint64_t& of(std::uint64_t stream) {
    for (Part& part : parts) {
      if (part.stream == stream || part.stream == 0) {
        part.stream = stream;
        return part.time;
      }
    }
    misuse("more streams than this driver can follow");
  }
  std::uint64_t seen(std::uint64_t stream) const {
    for (const Part& part : parts) {
      if (part.stream == stream) {
        return part.time;
      }
    }
    return 0;
  }
  void join(const Clock& other) {
    for (const Part& part : other.parts) {
      if (part.stream != 0 && seen(part.stream) < part.time) {
        of(part.stream) = part.time;
      }
    }
  }
};

// A lock between processes and threads, which is held only briefly.
class SpinLock {
 public:
  explicit SpinLock(std::atomic<std::uint32_t>& word) : word_(word) {
    // The number of attempts is limited, because a process may be killed while it holds the lock.
    for (int looks = 0; word_.exchange(1, std::memory_order_acquire) != 0 && looks < 10'000;
         ++looks) {
      ::usleep(100);
    }
  }
  SpinLock(const SpinLock&) = delete;
  SpinLock& operator=(const SpinLock&) = delete;
  ~SpinLock() { word_.store(0, std::memory_order_release); }

 private:
  std::atomic<std::uint32_t>& word_;
};

struct SharedEvent {
  std::atomic<std::uint32_t> alive{1};
  std::atomic<std::uint32_t> lock{0};
  std::atomic<std::uint64_t> recorded{0};
  std::atomic<std::uint64_t> done{0};
  Clock clock;  // valid together with `done`
};
static_assert(sizeof(SharedEvent) <= kPage, "one page");

// A block of memory, and its uses.
struct Uses {
  std::uint64_t writer = 0, written = 0;
  std::array<Clock::Part, 8> readers{};
};

struct SharedMemory {
  std::atomic<std::uint32_t> alive{1};
  std::atomic<std::uint32_t> lock{0};
  std::array<std::atomic<std::int32_t>, 8> openers{};  // processes that have it open
};
static_assert(sizeof(SharedMemory) <= kPage, "one page");

// An anonymous file. Other processes of the same user open it with the owner's process id and
// descriptor.
class File {
 public:
  struct Handle {
    std::uint64_t magic = kMagic;
    std::int64_t process = 0;
    std::int64_t fd = -1;
    std::uint64_t size_bytes = 0;
  };

  File() = default;
  explicit File(std::size_t size_bytes) : fd_(::memfd_create("standin-cuda", MFD_CLOEXEC)) {
    if (::ftruncate(fd_.get(), static_cast<off_t>(size_bytes)) != 0) {
      misuse("no memory");
    }
    handle_ = {kMagic, ::getpid(), fd_.get(), size_bytes};
    region_ = MappedRegion::untouched(fd_.get(), size_bytes);
  }
  // Maps a file of another process or of this process. Returns false if there is none.
  static bool open(const Handle& handle, File& file) {
    const std::string path =
        "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
    const ScopedFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (handle.magic != kMagic || !fd) {
      return false;
    }
    file.handle_ = handle;
    file.region_ = MappedRegion::untouched(fd.get(), handle.size_bytes);
    return true;
  }

  const Handle& handle() const { return handle_; }
  std::byte* data() const { return region_.data(); }

 private:
  Handle handle_;
  ScopedFd fd_;  // belongs to the process that created it
  MappedRegion region_;
};

// Returns whether the process is still running. A zombie does not count as running.
inline bool is_alive(pid_t process) {
  char line[256] = {};
  const ScopedFd fd(::open(("/proc/" + std::to_string(process) + "/stat").c_str(), O_RDONLY));
  const bool found = fd && ::read(fd.get(), line, sizeof(line) - 1) > 0;
  const char* const end = std::strrchr(line, ')');
  return found && end != nullptr && end[2] != 'Z' && end[2] != 'X';
}

// An allocation, either in the process that created it or in a process that opened it.
class Allocation {
 public:
  Allocation(File file, std::size_t size_bytes, bool imported)
      : file_(std::move(file)), size_bytes_(size_bytes), imported_(imported) {
    if (imported_) {
      find_opener(0).store(::getpid());
    }
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  static std::size_t file_bytes(std::size_t size_bytes) {
    return kPage + blocks(size_bytes) * sizeof(Uses) / kPage * kPage + kPage +
           blocks(size_bytes) * kPage;
  }

  const File& file() const { return file_; }
  bool imported() const { return imported_; }
  std::size_t size_bytes() const { return size_bytes_; }
  std::byte* data() const {
    return file_.data() + file_.handle().size_bytes - blocks(size_bytes_) * kPage;
  }

  // Frees the memory. Reports misuse if another process still has it open.
  void free() {
    for (const auto& opener : shared().openers) {
      const pid_t process = opener.load();
      if (process != 0 && is_alive(process)) {
        misuse("memory is freed that process " + std::to_string(process) + " has open");
      }
    }
    shared().alive.store(0);
  }
  void close() { find_opener(::getpid()).store(0); }

  // Records a use of the memory. Checks that the memory has not been freed, and that all
  // conflicting uses are ordered before this one.
  void use(std::byte* from, std::size_t count, bool write, std::uint64_t stream, Clock& clock) {
    if (shared().alive.load() == 0) {
      misuse("memory is used after it was freed");
    }
    const SpinLock guard(shared().lock);
    const auto start = static_cast<std::size_t>(from - data());
    for (std::size_t block = start / kPage; block * kPage < start + count; ++block) {
      Uses& uses = reinterpret_cast<Uses*>(file_.data() + kPage)[block];
      const auto unordered = [&](std::uint64_t who, std::uint64_t when) {
        return who != stream && who != 0 && clock.seen(who) < when;
      };
      if (unordered(uses.writer, uses.written)) {
        misuse(std::string(write ? "a write" : "a read") + " does not wait for a write before it");
      }
      for (Clock::Part& reader : uses.readers) {
        if (write && unordered(reader.stream, reader.time)) {
          misuse("a write does not wait for a read before it");
        }
      }
      note(uses, write, stream, clock.of(stream));
    }
  }

 private:
  static std::size_t blocks(std::size_t size_bytes) { return (size_bytes + kPage - 1) / kPage; }
  SharedMemory& shared() const { return *reinterpret_cast<SharedMemory*>(file_.data()); }
  std::atomic<std::int32_t>& find_opener(pid_t process) {
    for (auto& opener : shared().openers) {
      if (opener.load() == process) {
        return opener;
      }
    }
    misuse("memory is opened or closed once too often");
  }
  static void note(Uses& uses, bool write, std::uint64_t stream, std::uint64_t time) {
    if (write) {
      uses = {stream, time, {}};
      return;
    }
    for (Clock::Part& reader : uses.readers) {
      if (reader.stream == stream || reader.stream == 0) {
        reader = {stream, time};
        return;
      }
    }
    misuse("more readers of a block than this driver can follow");
  }

  File file_;
  const std::size_t size_bytes_;
  const bool imported_;
};

}  // namespace standin
