#include "common/assembler.h"

#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include "common/copy.h"
#include "common/error.h"

namespace adaptive {
namespace {

constexpr std::size_t kAlignment = 64;

std::shared_ptr<std::byte> allocate(std::uint64_t size_bytes, const Message& message, int peer) {
  void* memory = nullptr;
  if (::posix_memalign(&memory, kAlignment, size_bytes) != 0) {
    throw Error("there is not enough memory for the " + std::to_string(size_bytes) + " bytes of " +
                describe(message) + " from rank " + std::to_string(peer));
  }
  return {static_cast<std::byte*>(memory), [](std::byte* bytes) { std::free(bytes); }};
}

}  // namespace

std::optional<Arrival> Assembler::add(const Message& piece, const std::byte* data, int peer) {
  if (!busy()) {
    if (piece.nbytes > limit_bytes_) {
      throw Error(describe(piece) + " from rank " + std::to_string(peer) + " has " +
                  std::to_string(piece.nbytes) + " bytes, more than the limit of " +
                  std::to_string(limit_bytes_));
    }
    filled_bytes_ = 0;
  }
  const bool due =
      piece.offset == filled_bytes_ &&
      (!busy() || (piece.sequence == first_.sequence && piece.nbytes == first_.nbytes));
  if (!due || piece.piece_bytes > piece.nbytes - filled_bytes_) {
    throw Error("a piece of message " + std::to_string(piece.sequence) + " at " +
                std::to_string(piece.offset) + " from rank " + std::to_string(peer) +
                " was not expected: " + std::to_string(filled_bytes_) + " bytes of message " +
                std::to_string(busy() ? first_.sequence : piece.sequence) + " have arrived");
  }
  if (!busy()) {
    buffer_ = allocate(piece.nbytes, piece, peer);
    first_ = piece;
  }
  copy_bytes(buffer_.get() + filled_bytes_, data, piece.piece_bytes);
  filled_bytes_ += piece.piece_bytes;
  if (filled_bytes_ < first_.nbytes) {
    return std::nullopt;
  }
  Arrival arrival;
  arrival.peer = peer;
  arrival.message = first_;
  arrival.message.piece_bytes = first_.nbytes;
  std::byte* const start = buffer_.get();
  arrival.payload = Lease(start, first_.nbytes, std::move(buffer_), nullptr, 0);
  buffer_.reset();
  return arrival;
}

}  // namespace adaptive
