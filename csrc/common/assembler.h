// Reassembles a message that is larger than a slot from its pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "common/completions.h"
#include "common/message.h"

namespace adaptive {

// Belongs to one channel. The pieces of a message arrive in order and are not interleaved with
// pieces of other messages.
class Assembler {
 public:
  // `limit_bytes` is the largest payload that is accepted. It keeps a header from another process
  // from making this process allocate an arbitrary amount of memory.
  explicit Assembler(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Copies one checked piece. Returns the whole message if this is the last piece. Throws Error if
  // the piece is unexpected, the payload is above the limit, or memory cannot be allocated.
  std::optional<Arrival> add(const Message& piece, const std::byte* data, int peer);

  // Whether some but not all pieces of a message have arrived.
  bool busy() const noexcept { return static_cast<bool>(buffer_); }

 private:
  std::uint64_t limit_bytes_;
  Message first_;
  std::uint64_t filled_bytes_ = 0;
  std::shared_ptr<std::byte> buffer_;
};

}  // namespace adaptive
