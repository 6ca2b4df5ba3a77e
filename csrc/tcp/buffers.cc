#include "tcp/buffers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>
#include <utility>

#include "common/error.h"

namespace adaptive::tcp {
namespace {

std::size_t page_bytes() {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

std::size_t rounded(std::size_t size_bytes) {
  return round_up(std::max<std::size_t>(size_bytes, 1),
                  size_bytes >= kHugePageBytes ? kHugePageBytes : page_bytes());
}

std::unique_ptr<Block> make_block(std::size_t wanted_bytes) {
  const std::size_t size_bytes = rounded(wanted_bytes);
  auto block = std::make_unique<Block>(Block::anonymous(size_bytes));
#ifdef MADV_POPULATE_WRITE
  if (::madvise(block->data(), size_bytes, MADV_POPULATE_WRITE) == 0) {
    return block;
  }
  // Throw now, because a later access to a missing page would end the process with a signal.
  if (errno == ENOMEM) {
    throw_errno("madvise", "MADV_POPULATE_WRITE of " + std::to_string(size_bytes) +
                               " bytes for a received payload");
  }
#endif
  for (std::size_t i = 0; i < size_bytes; i += page_bytes()) {
    *const_cast<volatile std::byte*>(block->data() + i) = std::byte{0};
  }
  return block;
}

}  // namespace

std::unique_ptr<Block> BufferPool::take(std::size_t size_bytes) {
  const bool large = size_bytes > slot_bytes_;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& blocks = large ? free_large_ : free_;
    // Do not use a block that is more than twice as large as a large payload.
    const auto fits = [&](const std::unique_ptr<Block>& block) {
      return block->size_bytes() >= size_bytes && (!large || block->size_bytes() / 2 <= size_bytes);
    };
    const auto found = std::find_if(blocks.rbegin(), blocks.rend(), fits);
    if (found != blocks.rend()) {
      std::unique_ptr<Block> block = std::move(*found);
      blocks.erase(std::next(found).base());
      if (large) {
        cached_bytes_ -= block->size_bytes();
      }
      return block;
    }
  }
  return make_block(large ? size_bytes : slot_bytes_);
}

void BufferPool::give_back(std::unique_ptr<Block> block) noexcept {
  std::vector<std::unique_ptr<Block>> surplus;  // unmapped after the lock is released
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (block->size_bytes() <= rounded(slot_bytes_)) {
      free_.push_back(std::move(block));
      return;
    }
    free_large_.push_back(std::move(block));
    cached_bytes_ += free_large_.back()->size_bytes();
    // Frees the oldest blocks first, because their sizes are the least likely to be needed again.
    while (cached_bytes_ > cache_bytes_) {
      surplus.push_back(std::move(free_large_.front()));
      free_large_.erase(free_large_.begin());
      cached_bytes_ -= surplus.back()->size_bytes();
    }
  } catch (...) {
    // If there is no memory for the list entry, the block is unmapped.
  }
}

}  // namespace adaptive::tcp
