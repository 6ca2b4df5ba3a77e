// Memory that received payloads are put into and that is used again: the first touch of fresh
// memory costs ten times what the following ones do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/mapped_region.h"

namespace adaptive::tcp {

// Memory of this process alone, touched already.
using Block = MappedRegion;

// All methods may be called from any thread.
class BufferPool {
 public:
  // Blocks of `slot_bytes` are kept for good, larger ones up to `cache_bytes` in all.
  BufferPool(std::size_t slot_bytes, std::size_t cache_bytes)
      : slot_bytes_(slot_bytes), cache_bytes_(cache_bytes) {}

  // The block used last, so that it is in the caches, or a new one. Throws SystemError.
  std::unique_ptr<Block> take(std::size_t size_bytes);
  void give_back(std::unique_ptr<Block> block) noexcept;

 private:
  const std::size_t slot_bytes_;
  const std::size_t cache_bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> free_;
  std::vector<std::unique_ptr<Block>> free_large_;
  std::size_t cached_bytes_ = 0;  // of free_large_
};

}  // namespace adaptive::tcp
