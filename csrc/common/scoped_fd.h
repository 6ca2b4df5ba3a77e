// A class that owns a file descriptor, and functions for eventfds, with which threads and peers
// signal each other.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

#include "common/error.h"

namespace adaptive {

class ScopedFd {
 public:
  ScopedFd() noexcept = default;
  explicit ScopedFd(int fd) noexcept : fd_(fd) {}
  ScopedFd(ScopedFd&& other) noexcept : fd_(other.release()) {}
  ScopedFd& operator=(ScopedFd&& other) noexcept {
    if (this != &other) {
      reset(other.release());
    }
    return *this;
  }
  ScopedFd(const ScopedFd&) = delete;
  ScopedFd& operator=(const ScopedFd&) = delete;
  ~ScopedFd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  // Releases the descriptor; the caller must close it.
  int release() noexcept { return std::exchange(fd_, -1); }

  // close() is not repeated after EINTR, because Linux has already freed the number.
  void reset(int fd = -1) noexcept {
    const int old = std::exchange(fd_, fd);
    if (old >= 0) {
      ::close(old);
    }
  }

 private:
  int fd_ = -1;
};

// Returns a descriptor that is readable from signal() until clear(). Throws SystemError.
inline ScopedFd make_eventfd() {
  ScopedFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) {
    throw_errno("eventfd", "0");
  }
  return fd;
}

// If the write fails because the counter is full, the descriptor is already readable.
inline void signal(const ScopedFd& fd) noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd.get(), &one, sizeof(one));
}

inline void clear(const ScopedFd& fd) noexcept {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd.get(), &count, sizeof(count));
}

}  // namespace adaptive
