// The owner of a socket whose closing must be visible to the peer.
#pragma once

#include "common/scoped_fd.h"

namespace adaptive {

// A forked child (a data loader) that inherited such a socket would keep the connection open after
// its parent exited, and hide the exit from the peer. Therefore fork() replaces the socket in the
// child by an unconnected socket with the same number.
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
