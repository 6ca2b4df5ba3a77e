// Functions that encode, decode and check the bytes on a TCP channel's socket. The format is the
// same in both directions. docs/reference/transport.md describes the bytes.
//
//   frame   magic 4 | type 1 | zero 3 | credits 4 | piece bytes 4
//   start   frame, Message (128 bytes), first piece of the payload
//   more    frame, next piece of the payload
//   control, goodbye   frame
//
// Every frame may return credits. A payload is split into pieces, so that credits for the other
// direction need not wait for the end of a long payload.
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

// Throws Error for bytes that a sender of this version never sends.
Frame parse_frame(const std::byte* bytes, int peer);

// The options that the two ends exchange before the first frame.
struct Offer {
  std::uint64_t job = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t limit_bytes = 0;
  std::uint32_t slots = 0;
  std::chrono::milliseconds silent_limit{0};
};

constexpr std::size_t kOfferBytes = 40;

std::vector<std::uint8_t> encode_offer(const Offer& offer);

// Throws Error if the offer has another version, belongs to another job, or has invalid numbers.
Offer parse_offer(const std::vector<std::uint8_t>& bytes, std::uint64_t job, int peer);

// The receiver of decoded frames. Each method may throw Error, which ends the channel.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // Called at the beginning of a message. Returns memory for the message's nbytes, which must stay
  // valid until the message is complete.
  virtual std::byte* begin(const Message& message) = 0;
  virtual void complete(const Message& message) = 0;
  virtual void credits(std::uint32_t count) = 0;
  virtual void goodbye() = 0;
};

// Converts a stream of bytes into messages. Payloads are read from the socket directly into their
// final memory. Only the part that was read together with a header is copied.
class FrameDecoder {
 public:
  FrameDecoder(std::uint64_t job, std::uint64_t limit_bytes, int peer);

  // Buffers for the next bytes to read: first the rest of the current piece, if there is one, then
  // the data after it.
  struct Room {
    std::array<iovec, 2> parts{};
    int count = 0;
    std::size_t size_bytes = 0;
  };
  Room room() noexcept;

  // Processes `size_bytes` that were read into these buffers. Throws Error.
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
  std::size_t begin_ = 0;  // start of the staged bytes that have not been processed yet
  std::size_t end_ = 0;

  Message message_;  // the incoming message
  std::byte* payload_ = nullptr;
  std::uint64_t filled_bytes_ = 0;
  std::size_t piece_left_bytes_ = 0;
  bool in_message_ = false;
  bool goodbye_ = false;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace adaptive::tcp
