// The owner of a socket whose end the peer has to notice.
#pragma once

#include "common/scoped_fd.h"

namespace adaptive {

// A forked child (a loader of data) that inherited such a socket would keep the connection open
// after the end of its parent, and hide that end from the peer. fork() therefore replaces it in the
// child: the number stays taken, but belongs to a socket that is connected with nobody.
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
