// The bytes on a TCP channel's socket, the same in both directions, as functions over bytes: what
// comes from the peer is judged here. docs/reference/transport.md describes them.
//
//   frame   magic 4 | type 1 | zero 3 | credits 4 | piece bytes 4
//   start   frame, Message (128 bytes), first piece of the payload
//   more    frame, next piece of the payload
//   control, goodbye   frame
//
// Every frame may give credits back. A payload is cut into pieces so that credits of the other
// direction need not wait for the end of a long one.
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/channel.h"

namespace adaptive::tcp {

constexpr std::size_t kFrameBytes = 16;
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

enum class FrameType : std::uint8_t { kStart = 1, kMore, kControl, kGoodbye };

struct Frame {
  FrameType type = FrameType::kControl;
  std::uint32_t credits = 0;
  std::uint32_t piece_bytes = 0;
};

void encode_frame(const Frame& frame, std::byte* at) noexcept;

// Throws Error for anything that no sender of this version says.
Frame parse_frame(const std::byte* bytes, int peer);

// What the two ends tell each other before the first frame.
struct Offer {
  std::uint64_t job = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t limit_bytes = 0;
  std::uint32_t slots = 0;
  std::chrono::milliseconds silent_limit{0};
};

constexpr std::size_t kOfferBytes = 40;

std::vector<std::uint8_t> encode_offer(const Offer& offer);

// Throws Error for an offer of another version or job, or with numbers that cannot be.
Offer parse_offer(const std::vector<std::uint8_t>& bytes, std::uint64_t job, int peer);

// Who is told what the bytes mean. Each may throw Error, which ends the channel.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // A message begins: returns memory for its nbytes, which stays valid until it is complete.
  virtual std::byte* begin(const Message& message) = 0;
  virtual void complete(const Message& message) = 0;
  virtual void credits(std::uint32_t count) = 0;
  virtual void goodbye() = 0;
};

// Turns a stream of bytes into messages. Payloads go from the socket into their memory: only what
// the socket gave together with a header is copied.
class FrameDecoder {
 public:
  FrameDecoder(std::uint64_t job, std::uint64_t limit_bytes, int peer);

  // Where the next bytes belong: the rest of a piece, if one is due, then what follows it.
  struct Room {
    std::array<iovec, 2> parts{};
    int count = 0;
    std::size_t size_bytes = 0;
  };
  Room room() noexcept;

  // `size_bytes` were put there. Throws Error.
  void took(std::size_t size_bytes, FrameSink& sink);

 private:
  std::size_t staged() const noexcept { return end_ - begin_; }
  bool parse_next(FrameSink& sink);
  void begin_message(const Frame& frame, const std::byte* bytes, FrameSink& sink);
  void continue_message(const Frame& frame);
  void fill_from_staging() noexcept;

  const std::uint64_t job_;
  const std::uint64_t limit_bytes_;
  const int peer_;
  std::unique_ptr<std::byte[]> staging_;
  std::size_t begin_ = 0;  // of what is staged and not looked at
  std::size_t end_ = 0;

  Message message_;  // the one that is coming in
  std::byte* payload_ = nullptr;
  std::uint64_t filled_bytes_ = 0;
  std::size_t piece_left_bytes_ = 0;
  bool in_message_ = false;
  bool goodbye_ = false;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace adaptive::tcp
