// The owner of a socket. When the socket closes, the peer must notice it.
#pragma once

#include "common/scoped_fd.h"

namespace adaptive {

// A forked child (a data loader) that inherited such a socket would keep the connection open after
// its parent exited, and hide the exit from the peer. Therefore a fork handler replaces the child's
// copy with an unconnected socket that has the same number.
class ForkSafeFd {
 public:
  ForkSafeFd() noexcept = default;
  explicit ForkSafeFd(ScopedFd fd);
  ForkSafeFd(ForkSafeFd&&) noexcept = default;
  ForkSafeFd& operator=(ForkSafeFd&& other) noexcept;
  ~ForkSafeFd() { reset(); }

  int get() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }
  void reset() noexcept;

 private:
  ScopedFd fd_;
};

}  // namespace adaptive
