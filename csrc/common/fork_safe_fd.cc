#include "common/fork_safe_fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "common/error.h"

namespace adaptive {
namespace {

// Each process has one registry, because a fork() affects all of its sockets. The registry is never
// destroyed, because objects that use it may be destroyed at the very end of the process.
class Registry {
 public:
  static Registry& instance() {
    static Registry* const registry = new Registry();
    return *registry;
  }

  void add(int fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!nobody_) {
      nobody_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    }
    if (!nobody_) {
      throw_errno("socket", "AF_UNIX");
    }
    fds_.push_back(fd);
  }

  // Removes and closes the descriptor under the lock. Otherwise another thread's fork() could
  // mistake a reused number for one of these sockets.
  void close(ScopedFd* fd) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    fds_.erase(std::remove(fds_.begin(), fds_.end(), fd->get()), fds_.end());
    fd->reset();
    if (fds_.empty()) {
      nobody_.reset();
    }
  }

 private:
  Registry() {
    const int code =
        ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                         [] { instance().replace_all(); });
    if (code != 0) {
      throw SystemError("pthread_atfork", "3 handlers", code);
    }
  }

  // Runs in the child, where the lock is still held because the thread that called fork() took it.
  void replace_all() noexcept {
    for (const int fd : fds_) {
      ::dup3(nobody_.get(), fd, O_CLOEXEC);
    }
    mutex_.unlock();
  }

  std::mutex mutex_;
  ScopedFd nobody_;  // set while fds_ is not empty
  std::vector<int> fds_;
};

}  // namespace

ForkSafeFd::ForkSafeFd(ScopedFd fd) : fd_(std::move(fd)) {
  if (fd_) {
    Registry::instance().add(fd_.get());
  }
}

ForkSafeFd& ForkSafeFd::operator=(ForkSafeFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::move(other.fd_);
  }
  return *this;
}

void ForkSafeFd::reset() noexcept {
  if (fd_) {
    Registry::instance().close(&fd_);
  }
}

}  // namespace adaptive
