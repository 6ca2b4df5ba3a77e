// The one owner of a shared memory mapping.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <string>
#include <utility>

#include "common/error.h"

namespace adaptive {

class MappedRegion {
 public:
  MappedRegion() noexcept = default;

  // Maps the first size_bytes of fd, readable and writable, shared, and touches every page now so
  // that no page fault falls into a hot path. The mapping outlives fd.
  static MappedRegion shared(int fd, std::size_t size_bytes) {
    void* address =
        ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (address == MAP_FAILED) {
      throw_errno("mmap", std::to_string(size_bytes) + " bytes, shared");
    }
    return MappedRegion(address, size_bytes);
  }

  // As shared(), but leaves the pages to whoever touches them first, which can be told how.
  static MappedRegion untouched(int fd, std::size_t size_bytes) {
    void* address = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
      throw_errno("mmap", std::to_string(size_bytes) + " bytes, shared");
    }
    return MappedRegion(address, size_bytes);
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
  MappedRegion(void* address, std::size_t size_bytes) noexcept
      : address_(address), size_bytes_(size_bytes) {}

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
