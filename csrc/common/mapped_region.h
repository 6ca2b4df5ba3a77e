// Memory files that processes share, and a class that owns a mapping of such a file.
#pragma once

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <string>
#include <utility>

#include "common/error.h"
#include "common/scoped_fd.h"

namespace adaptive {

// Seals that fix the size of a file. If a peer could shrink the file, an access past its end would
// kill this process.
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Creates an anonymous file of zeros with a fixed size. Throws SystemError.
inline ScopedFd make_sealed_file(const char* name, std::size_t size_bytes, unsigned flags = 0) {
  ScopedFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!fd) {
    throw_errno("memfd_create", name);
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) {
    throw_errno("ftruncate", std::to_string(size_bytes) + " bytes");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSizeSeals) != 0) {
    throw_errno("fcntl", "F_ADD_SEALS");
  }
  return fd;
}

// Returns the size of a sealed file that another process created. Throws Error, with a message that
// begins with `what`, if the size is not sealed.
inline std::size_t sealed_size(int fd, const std::string& what) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw_errno("fstat", what);
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    throw Error(what + ": the size of that file is not sealed");
  }
  return static_cast<std::size_t>(status.st_size);
}

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

constexpr std::size_t round_up(std::size_t size, std::size_t unit) noexcept {
  return (size + unit - 1) / unit * unit;
}

class MappedRegion {
 public:
  MappedRegion() noexcept = default;

  // Creates a shared mapping of the first size_bytes of fd, readable and writable. Touches every
  // page now, so that no page fault happens in a hot path. The mapping outlives fd. Throws
  // SystemError.
  static MappedRegion shared(int fd, std::size_t size_bytes) {
    return MappedRegion(fd, size_bytes, MAP_SHARED | MAP_POPULATE);
  }

  // Like shared(), but does not touch the pages.
  static MappedRegion untouched(int fd, std::size_t size_bytes) {
    return MappedRegion(fd, size_bytes, MAP_SHARED);
  }

  // Creates private memory that is filled with zeros and not touched yet, with huge pages if
  // possible. Throws SystemError.
  static MappedRegion anonymous(std::size_t size_bytes) {
    MappedRegion region(-1, size_bytes, MAP_PRIVATE | MAP_ANONYMOUS);
    if (size_bytes >= kHugePageBytes) {
      ::madvise(region.address_, size_bytes, MADV_HUGEPAGE);  // failure is allowed
    }
    return region;
  }

  MappedRegion(MappedRegion&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)),
        size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  MappedRegion& operator=(MappedRegion&& other) noexcept {
    if (this != &other) {
      unmap();
      address_ = std::exchange(other.address_, nullptr);
      size_bytes_ = std::exchange(other.size_bytes_, 0);
    }
    return *this;
  }
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;
  ~MappedRegion() { unmap(); }

  std::byte* data() const noexcept { return static_cast<std::byte*>(address_); }
  std::size_t size_bytes() const noexcept { return size_bytes_; }

 private:
  MappedRegion(int fd, std::size_t size_bytes, int flags)
      : address_(::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, flags, fd, 0)),
        size_bytes_(size_bytes) {
    if (address_ == MAP_FAILED) {
      throw_errno("mmap", std::to_string(size_bytes) + " bytes");
    }
  }

  void unmap() noexcept {
    if (address_ != nullptr) {
      ::munmap(address_, size_bytes_);
      address_ = nullptr;
    }
  }

  void* address_ = nullptr;
  std::size_t size_bytes_ = 0;
};

}  // namespace adaptive
