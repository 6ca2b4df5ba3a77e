#include "tcp/frame.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "common/error.h"

namespace adaptive::tcp {
namespace {

constexpr std::uint32_t kFrameMagic = 0x4D41'5446;  // "MATF"
constexpr std::uint32_t kOfferMagic = 0x4D41'544F;  // "MATO"
constexpr std::uint32_t kVersion = 1;
// Small messages arrive completely together with their frame. At most this many bytes of a long
// message are copied twice.
constexpr std::size_t kStagingBytes = std::size_t{16} << 10;

struct FrameLayout {
  std::uint32_t magic;
  std::uint8_t type;
  std::uint8_t zero[3];
  std::uint32_t credits;
  std::uint32_t piece_bytes;
};
static_assert(sizeof(FrameLayout) == kFrameBytes);

struct OfferLayout {
  std::uint32_t magic;
  std::uint32_t version;
  std::uint64_t job;
  std::uint64_t slot_bytes;
  std::uint64_t limit_bytes;
  std::uint32_t slots;
  std::uint32_t silent_limit_ms;
};
static_assert(sizeof(OfferLayout) == kOfferBytes);

[[noreturn]] void refuse(int peer, const std::string& finding) {
  throw Error("rank " + std::to_string(peer) + " sent " + finding +
              "; do both ranks run the same version?");
}

}  // namespace

void encode_frame(const Frame& frame, std::byte* at) noexcept {
  const FrameLayout layout{
      kFrameMagic, static_cast<std::uint8_t>(frame.type), {}, frame.credits, frame.piece_bytes};
  std::memcpy(at, &layout, sizeof(layout));
}

Frame parse_frame(const std::byte* bytes, int peer) {
  FrameLayout layout;
  std::memcpy(&layout, bytes, sizeof(layout));
  if (layout.magic != kFrameMagic) {
    refuse(peer, "bytes that are not a frame");
  }
  const bool known = layout.type >= static_cast<std::uint8_t>(FrameType::kStart) &&
                     layout.type <= static_cast<std::uint8_t>(FrameType::kGoodbye);
  if (!known || layout.zero[0] != 0 || layout.zero[1] != 0 || layout.zero[2] != 0) {
    refuse(peer, "a frame of unknown type " + std::to_string(layout.type));
  }
  const Frame frame{static_cast<FrameType>(layout.type), layout.credits, layout.piece_bytes};
  const bool has_piece = frame.type == FrameType::kStart || frame.type == FrameType::kMore;
  if (frame.piece_bytes > (has_piece ? kPieceBytes : 0)) {
    refuse(peer, "a piece of " + std::to_string(frame.piece_bytes) + " bytes");
  }
  return frame;
}

std::vector<std::uint8_t> encode_offer(const Offer& offer) {
  const OfferLayout layout{kOfferMagic,
                           kVersion,
                           offer.job,
                           offer.slot_bytes,
                           offer.limit_bytes,
                           offer.slots,
                           static_cast<std::uint32_t>(offer.silent_limit.count())};
  std::vector<std::uint8_t> bytes(sizeof(layout));
  std::memcpy(bytes.data(), &layout, sizeof(layout));
  return bytes;
}

Offer parse_offer(const std::vector<std::uint8_t>& bytes, std::uint64_t job, int peer) {
  OfferLayout layout{};
  if (bytes.size() != sizeof(layout)) {
    refuse(peer, std::to_string(bytes.size()) + " bytes instead of its options");
  }
  std::memcpy(&layout, bytes.data(), sizeof(layout));
  if (layout.magic != kOfferMagic || layout.version != kVersion) {
    refuse(peer, "something other than its options, or those of another version");
  }
  if (layout.job != job) {
    refuse(peer, "job " + std::to_string(layout.job) + ", this one is " + std::to_string(job));
  }
  const std::chrono::milliseconds silent_limit(layout.silent_limit_ms);
  if (layout.slots < 1 || layout.slots > kMostSlots || layout.slot_bytes < 1 ||
      layout.slot_bytes > kLargestSlotBytes || silent_limit < kLeastSilence ||
      silent_limit > kMostSilence) {
    refuse(peer, std::to_string(layout.slots) + " slots of " + std::to_string(layout.slot_bytes) +
                     " bytes and a time limit of " + std::to_string(layout.silent_limit_ms) +
                     " ms");
  }
  Offer offer;
  offer.job = layout.job;
  offer.slot_bytes = layout.slot_bytes;
  offer.limit_bytes = layout.limit_bytes;
  offer.slots = layout.slots;
  offer.silent_limit = silent_limit;
  return offer;
}

FrameDecoder::FrameDecoder(std::uint64_t job, std::uint64_t limit_bytes, int peer)
    : job_(job),
      limit_bytes_(std::min<std::uint64_t>(limit_bytes, std::numeric_limits<std::size_t>::max())),
      peer_(peer),
      staging_(new std::byte[kStagingBytes]) {}

FrameDecoder::Room FrameDecoder::room() noexcept {
  Room room;
  const auto add = [&](std::byte* at, std::size_t size_bytes) {
    room.parts[static_cast<std::size_t>(room.count++)] = {at, size_bytes};
    room.size_bytes += size_bytes;
  };
  if (piece_left_bytes_ != 0) {
    add(payload_ + filled_bytes_, piece_left_bytes_);
  }
  add(staging_.get() + end_, kStagingBytes - end_);
  return room;
}

void FrameDecoder::took(std::size_t size_bytes, FrameSink& sink) {
  const std::size_t direct_bytes = std::min(size_bytes, piece_left_bytes_);
  filled_bytes_ += direct_bytes;
  piece_left_bytes_ -= direct_bytes;
  end_ += size_bytes - direct_bytes;
  do {
    fill_from_staging();
    if (in_message_ && piece_left_bytes_ == 0 && filled_bytes_ == message_.nbytes) {
      in_message_ = false;
      payload_ = nullptr;
      sink.complete(message_);
    }
  } while (piece_left_bytes_ == 0 && parse_next(sink));
  // The unprocessed rest is shorter than a header, so the buffer always has room for the remainder
  // of the header.
  std::memmove(staging_.get(), staging_.get() + begin_, staged());
  end_ -= begin_;
  begin_ = 0;
}

void FrameDecoder::fill_from_staging() noexcept {
  const std::size_t count = std::min(staged(), piece_left_bytes_);
  if (count != 0) {
    std::memcpy(payload_ + filled_bytes_, staging_.get() + begin_, count);
    begin_ += count;
    filled_bytes_ += count;
    piece_left_bytes_ -= count;
  }
}

bool FrameDecoder::parse_next(FrameSink& sink) {
  if (staged() < kFrameBytes) {
    return false;
  }
  const std::byte* bytes = staging_.get() + begin_;
  const Frame frame = parse_frame(bytes, peer_);
  std::size_t header_bytes = kFrameBytes;
  if (frame.type == FrameType::kStart) {
    header_bytes += sizeof(Message);
    if (staged() < header_bytes) {
      return false;
    }
  }
  // Credits are added first, so that the code that handles the message can use them.
  if (frame.credits != 0) {
    sink.credits(frame.credits);
  }
  begin_ += header_bytes;
  switch (frame.type) {
    case FrameType::kStart:
      begin_message(frame, bytes + kFrameBytes, sink);
      break;
    case FrameType::kMore:
      continue_message(frame);
      break;
    case FrameType::kControl:
      break;
    case FrameType::kGoodbye:
      if (in_message_) {
        refuse(peer_, "a goodbye within " + describe(message_));
      }
      goodbye_ = true;
      sink.goodbye();
      break;
  }
  return true;
}

void FrameDecoder::begin_message(const Frame& frame, const std::byte* bytes, FrameSink& sink) {
  Message message;
  std::memcpy(static_cast<void*>(&message), bytes, sizeof(message));
  check_message(message, job_, static_cast<std::size_t>(limit_bytes_), peer_);
  if (in_message_ || goodbye_) {
    refuse(peer_,
           describe(message) + (goodbye_ ? " after its goodbye" : " within " + describe(message_)));
  }
  if (message.sequence != next_sequence_ || message.piece_bytes != message.nbytes) {
    refuse(peer_, "message " + std::to_string(message.sequence) + " with a piece of " +
                      std::to_string(message.piece_bytes) + " of " +
                      std::to_string(message.nbytes) + " bytes where message " +
                      std::to_string(next_sequence_) + " was expected");
  }
  if (frame.piece_bytes > message.nbytes || (frame.piece_bytes == 0 && message.nbytes != 0)) {
    refuse(peer_, "a first piece of " + std::to_string(frame.piece_bytes) +
                      " bytes of a payload of " + std::to_string(message.nbytes));
  }
  payload_ = sink.begin(message);
  message_ = message;
  filled_bytes_ = 0;
  piece_left_bytes_ = frame.piece_bytes;
  in_message_ = true;
  ++next_sequence_;
}

void FrameDecoder::continue_message(const Frame& frame) {
  const std::uint64_t left_bytes = in_message_ ? message_.nbytes - filled_bytes_ : 0;
  if (frame.piece_bytes == 0 || frame.piece_bytes > left_bytes) {
    refuse(peer_, "a further piece of " + std::to_string(frame.piece_bytes) + " bytes where " +
                      std::to_string(left_bytes) + " were expected");
  }
  piece_left_bytes_ = frame.piece_bytes;
}

}  // namespace adaptive::tcp
