// Puts a message that is larger than a slot together again, piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "common/completions.h"
#include "common/message.h"

namespace adaptive {

// Of one channel. Pieces of a message come in order and are not mixed with others.
class Assembler {
 public:
  // `limit_bytes`: the largest payload accepted, so that a foreign header cannot make this process
  // ask for any amount of memory.
  explicit Assembler(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Copies one checked piece. Returns the whole message with the last one. Throws Error for a piece
  // that was not due, a payload above the limit, and where there is no memory for it.
  std::optional<Arrival> add(const Message& piece, const std::byte* data, int peer);

  // Whether a message is half there.
  bool busy() const noexcept { return static_cast<bool>(buffer_); }

 private:
  std::uint64_t limit_bytes_;
  Message first_;
  std::uint64_t filled_bytes_ = 0;
  std::shared_ptr<std::byte> buffer_;
};

}  // namespace adaptive
