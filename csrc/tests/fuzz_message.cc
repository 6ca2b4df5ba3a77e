// Fuzzer of check_message() and of the assembler of pieces. Parts:
// csrc/common/{message,assembler}.cc csrc/common/copy.cc
#include <algorithm>
#include <optional>

#include "common/assembler.h"
#include "common/error.h"
#include "common/message.h"
#include "tests/fuzz.h"

namespace {

using adaptive::Arrival;
using adaptive::Assembler;
using adaptive::Message;
using adaptive::testing::append;
using adaptive::testing::FuzzInput;
using adaptive::testing::FuzzReader;
using adaptive::testing::must;

constexpr std::uint64_t kJob = 3;
constexpr std::size_t kRoomBytes = 256;
constexpr std::uint64_t kLimitBytes = 4096;

// What those who act upon a message rely on.
void check_accepted(const Message& message) {
  must(message.dimensions <= adaptive::kMaxDimensions, "few enough dimensions");
  const std::size_t element_bytes = adaptive::element_bytes(message.dtype);
  must(element_bytes >= 1 && element_bytes <= 16, "a known element type");
  unsigned __int128 nbytes = element_bytes;
  bool empty = false;
  for (int i = 0; i < message.dimensions; ++i) {
    must(message.shape[i] >= 0, "sizes that can be");
    empty = empty || message.shape[i] == 0;
    // Up to 2^64 each; saturated, so that seven of them cannot overflow.
    nbytes = std::min<unsigned __int128>(nbytes, ~std::uint64_t{0}) *
             static_cast<std::uint64_t>(message.shape[i]);
  }
  must(message.nbytes == (empty ? 0 : nbytes), "a shape of so many bytes");
  must(message.piece_bytes <= kRoomBytes, "a piece for which there is room");
  must(message.offset <= message.nbytes && message.piece_bytes <= message.nbytes - message.offset,
       "a piece within the payload");
}

Message message_of(std::uint64_t nbytes, std::uint64_t offset, std::uint64_t piece_bytes) {
  Message message;
  message.job = kJob;
  message.nbytes = nbytes;
  message.offset = offset;
  message.piece_bytes = piece_bytes;
  message.dimensions = 1;
  message.shape[0] = static_cast<std::int64_t>(nbytes);
  return message;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzReader reader(data, size);
  Assembler assembler(kLimitBytes);
  const std::vector<std::byte> payload(kRoomBytes, std::byte{1});
  while (reader.left() != 0) {
    const auto message = reader.take<Message>();
    must(!describe(message).empty(), "a description of anything");
    try {
      adaptive::check_message(message, kJob, kRoomBytes, 0);
    } catch (const adaptive::Error&) {
      continue;
    }
    check_accepted(message);
    try {
      const std::optional<Arrival> whole = assembler.add(message, payload.data(), 0);
      must(whole.has_value() == !assembler.busy(), "either a whole message or one half there");
      if (whole) {
        must(whole->payload.size_bytes() == whole->message.nbytes, "all of the payload");
        must(whole->message.nbytes <= kLimitBytes, "a payload within the limit");
        must(std::all_of(whole->payload.data(), whole->payload.data() + whole->message.nbytes,
                         [](std::byte byte) { return byte == std::byte{1}; }),
             "every byte of it filled");
      }
    } catch (const adaptive::Error&) {
      return 0;  // ends the channel
    }
  }
  return 0;
}

std::vector<FuzzInput> adaptive::testing::fuzz_seeds() {
  FuzzInput one;
  append(one, message_of(100, 0, 100));
  FuzzInput empty;
  append(empty, message_of(0, 0, 0));
  FuzzInput pieces;
  for (std::uint64_t offset = 0; offset < 600; offset += 200) {
    append(pieces, message_of(600, offset, 200));
  }
  FuzzInput wide;
  Message matrix = message_of(8 * 2 * 3 * 4, 0, 8 * 2 * 3 * 4);
  matrix.dtype = ElementType::kFloat64;
  matrix.dimensions = kMaxDimensions;
  const std::int64_t shape[kMaxDimensions] = {1, 2, 1, 3, 1, 4, 1};
  std::copy(shape, shape + kMaxDimensions, matrix.shape);
  append(wide, matrix);
  return {one, empty, pieces, wide};
}
