// The layout and use of the memory that both ends of a directed channel map.
//
//   control   [ lines with one writer each | entries 0..N-1, 192 bytes each ]
//   data      [ slot 0 | slot 1 | ... | slot K-1 ], each slot_stride bytes
//
//   sender                                receiver
//   takes a free slot, copies in          reads entry number `next`, hands out a view of its slot
//   writes an entry, then its number      ...
//                                         gives the slot back: sets its bit in `returned`
//   takes all bits of `returned`
//
// The receiver reads an entry before it returns the entry's slot. With N > K + 1 entries, no entry
// is therefore overwritten before it is read. The additional entry is for the end of the channel,
// which has no slot.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/channel.h"

namespace adaptive::shm {

constexpr std::size_t kLine = 64;
// The payload was computed into the slot with ordinary stores.
constexpr std::uint32_t kComputedInPlace = 1;
// The payload is in the slot with this number in the memory of the receiver's GPU; see
// cuda/arena.h.
constexpr std::uint32_t kOnDevice = 2;
constexpr std::uint32_t kNoSlot = 0xFFFF'FFFF;
constexpr std::uint64_t kControlMagic = 0x4d41'5053'484d'4331ULL;
constexpr std::uint32_t kControlVersion = 2;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "atomics that hide a lock cannot be shared between processes");

// Number of bytes of a message in the first two cache lines of an entry. The third line contains
// only the sizes of the sixth and later dimensions, so most messages need just two lines.
constexpr std::size_t kFrontBytes = 112;
constexpr int kFrontDimensions = 5;

struct alignas(kLine) Entry {
  std::atomic<std::uint64_t> number;  // starts at 1, written last
  std::uint32_t slot;
  std::uint32_t flags;
  unsigned char front[kFrontBytes];
  unsigned char back[sizeof(Message) - kFrontBytes];
};
static_assert(sizeof(Entry) == 3 * kLine && offsetof(Entry, front) == 16 &&
                  offsetof(Entry, back) == 2 * kLine,
              "the layout is shared by processes");
static_assert(offsetof(Message, shape) + kFrontDimensions * sizeof(std::int64_t) == kFrontBytes,
              "the front part must end after the fifth dimension");

struct alignas(kLine) SenderLine {
  std::uint64_t magic;
  std::uint32_t version;
  // Set if a message waits for a slot. A thread that returns a slot must then signal the credit
  // descriptor.
  std::atomic<std::uint32_t> wants_credit;
  // Set when the sender has closed the receiver's GPU memory.
  std::atomic<std::uint32_t> device_closed;
};
struct alignas(kLine) ReturnLine {
  std::atomic<std::uint64_t> returned;  // one bit per slot
};
struct alignas(kLine) ReceiverLine {
  std::atomic<std::uint32_t> closed;  // nothing will be read any more
};
// A cache line with one writer, for measuring the distance between the two processors.
struct alignas(kLine) PingLine {
  std::atomic<std::uint64_t> value;
};

struct Control {
  SenderLine sender;
  ReturnLine returns;
  ReceiverLine receiver;
  PingLine ping;
  PingLine pong;
  // Entries follow.
};

// Describes the memory that one end of a channel created. Sent to the other end as bytes.
struct Offer {
  std::uint64_t magic = kControlMagic;
  std::uint32_t version = kControlVersion;
  std::uint32_t slots = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t slot_stride = 0;
  std::uint64_t num_entries = 0;
  std::uint64_t control_bytes = 0;
  std::uint64_t data_bytes = 0;
  std::uint64_t job = 0;
};
static_assert(std::is_trivially_copyable_v<Offer> && sizeof(Offer) == 64, "sent as bytes");

constexpr std::size_t control_bytes(std::size_t entries) noexcept {
  return sizeof(Control) + entries * sizeof(Entry);
}

constexpr std::size_t entries_for(unsigned slots) noexcept {
  std::size_t entries = 4;
  while (entries < std::size_t{slots} + 2) {
    entries *= 2;
  }
  return entries;
}

}  // namespace adaptive::shm
