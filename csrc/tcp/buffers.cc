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

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

std::size_t rounded(std::size_t size_bytes) {
  const auto page_bytes = size_bytes >= kHugePageBytes
                              ? kHugePageBytes
                              : static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t pages = size_bytes / page_bytes + (size_bytes % page_bytes != 0 ? 1 : 0);
  return std::max<std::size_t>(pages, 1) * page_bytes;
}

}  // namespace

Block::Block(std::size_t size_bytes) : size_bytes_(rounded(size_bytes)) {
  void* address =
      ::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    throw_errno("mmap", std::to_string(size_bytes_) + " bytes for a received payload");
  }
  data_ = static_cast<std::byte*>(address);
  if (size_bytes_ >= kHugePageBytes) {
    ::madvise(data_, size_bytes_, MADV_HUGEPAGE);  // a wish
  }
#ifdef MADV_POPULATE_WRITE
  if (::madvise(data_, size_bytes_, MADV_POPULATE_WRITE) == 0) {
    return;
  }
  // There is not enough memory: better said now than by a signal later.
  if (errno == ENOMEM) {
    ::munmap(data_, size_bytes_);
    throw SystemError("madvise", "MADV_POPULATE_WRITE of " + std::to_string(size_bytes_) + " bytes",
                      ENOMEM);
  }
#endif
  const auto step = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t i = 0; i < size_bytes_; i += step) {
    *const_cast<volatile std::byte*>(data_ + i) = std::byte{0};
  }
}

Block::~Block() {
  ::munmap(data_, size_bytes_);
}

std::unique_ptr<Block> BufferPool::take(std::size_t size_bytes) {
  const bool large = size_bytes > slot_bytes_;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& blocks = large ? free_large_ : free_;
    // A large block may be up to twice as large as need be.
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
  return std::make_unique<Block>(large ? size_bytes : slot_bytes_);
}

void BufferPool::give_back(std::unique_ptr<Block> block) noexcept {
  std::vector<std::unique_ptr<Block>> surplus;  // unmapped without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (block->size_bytes() <= rounded(slot_bytes_)) {
      free_.push_back(std::move(block));
      return;
    }
    free_large_.push_back(std::move(block));
    cached_bytes_ += free_large_.back()->size_bytes();
    // The oldest go: their sizes may not come again.
    while (cached_bytes_ > cache_bytes_) {
      surplus.push_back(std::move(free_large_.front()));
      free_large_.erase(free_large_.begin());
      cached_bytes_ -= surplus.back()->size_bytes();
    }
  } catch (...) {
    // No memory to note a block in: it is unmapped.
  }
}

}  // namespace adaptive::tcp
