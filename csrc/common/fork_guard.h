// Detects without a system call whether this process is the process that created an object.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "common/error.h"

namespace adaptive {

// A forked child, such as a data loader, has copies of its parent's objects. Such a copy must
// neither reply to peers nor return slots. The kernel fills the page of `mark_` with zeros in every
// child.
class ForkGuard {
 public:
  ForkGuard() : size_bytes_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
    void* page =
        ::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
      throw_errno("mmap", "one page");
    }
    mark_ = static_cast<unsigned char*>(page);
    if (::madvise(page, size_bytes_, MADV_WIPEONFORK) != 0) {
      const int code = errno;
      ::munmap(page, size_bytes_);
      throw SystemError("madvise", "MADV_WIPEONFORK", code);
    }
    *mark_ = 1;
  }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;
  ~ForkGuard() { ::munmap(mark_, size_bytes_); }

  bool in_maker() const noexcept { return *mark_ != 0; }

 private:
  std::size_t size_bytes_;
  unsigned char* mark_ = nullptr;
};

}  // namespace adaptive
