// Reused memory for received payloads. The first touch of new memory costs ten times as much as
// later accesses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/mapped_region.h"

namespace adaptive::tcp {

// Private memory whose pages have already been touched.
using Block = MappedRegion;

// All methods may be called from any thread.
class BufferPool {
 public:
  // Blocks of `slot_bytes` are never freed. Of the larger blocks, up to `cache_bytes` in total are
  // kept.
  BufferPool(std::size_t slot_bytes, std::size_t cache_bytes)
      : slot_bytes_(slot_bytes), cache_bytes_(cache_bytes) {}

  // Returns the most recently used block, which is still in the caches, or a new block. Throws
  // SystemError.
  std::unique_ptr<Block> take(std::size_t size_bytes);
  void give_back(std::unique_ptr<Block> block) noexcept;

 private:
  const std::size_t slot_bytes_;
  const std::size_t cache_bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> free_;
  std::vector<std::unique_ptr<Block>> free_large_;
  std::size_t cached_bytes_ = 0;  // total size of free_large_
};

}  // namespace adaptive::tcp
