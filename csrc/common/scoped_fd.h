// The one owner of a file descriptor.
#pragma once

#include <unistd.h>

#include <utility>

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

  // Gives the descriptor away; the caller closes it.
  int release() noexcept { return std::exchange(fd_, -1); }

  // close() is not repeated on EINTR: Linux has freed the number by then.
  void reset(int fd = -1) noexcept {
    const int old = std::exchange(fd_, fd);
    if (old >= 0) {
      ::close(old);
    }
  }

 private:
  int fd_ = -1;
};

}  // namespace adaptive
